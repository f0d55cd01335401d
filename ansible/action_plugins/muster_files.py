"""Files with given text, owner and mode. Ansible's copy writes those that differ; which ones is asked at once.

A module of Ansible costs half a second of processor time on a host, even where it finds nothing to do, and copy takes
two of them a file. That is most of what a second run would do. Here one plain command looks at all files of a task.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import PurePosixPath
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

KEYS = {"path", "content", "mode", "owner", "group"}


class ActionModule(ActionBase):  # type: ignore[misc]
    """`muster_files: {files: [{path, content, mode: "0644", owner: root, group: root}]}`; makes folders as needed."""

    _VALID_ARGS = frozenset(("files",))
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed where a file was not as it is wanted; `written` has their paths."""
        super().run(tmp, task_vars)
        files = [self._checked(file) for file in self._task.args.get("files") or ()]
        found = self._found([file["path"] for file in files])
        result: dict[str, Any] = {"changed": False, "written": [], "diff": []}
        for file in files:
            sha256 = hashlib.sha256(file["content"].encode()).hexdigest()
            if found.get(file["path"]) == (sha256, file["mode"].lstrip("0"), file["owner"], file["group"]):
                continue
            result["changed"] = True
            result["written"].append(file["path"])
            copied = self._write(file, task_vars)
            if copied.get("failed"):
                return {**result, **copied}
            diff = copied.get("diff") or []
            result["diff"] += diff if isinstance(diff, list) else [diff]
        return result

    @staticmethod
    def _checked(file: dict[str, str]) -> dict[str, str]:
        if not {"path", "content"} <= set(file) <= KEYS:
            raise AnsibleActionFail(f"a file has path, content and perhaps mode, owner, group; given: {sorted(file)}")
        return {"mode": "0644", "owner": "root", "group": "root", **file}

    def _found(self, paths: list[str]) -> dict[str, tuple[str, str, str, str]]:
        """Hash, mode, owner and group of each file that is there."""
        if not paths:
            return {}
        names = " ".join(map(shlex.quote, paths))
        command = f"stat --format '%n %a %U %G' {names} 2>/dev/null; sha256sum {names} 2>/dev/null; true"
        said = self._low_level_execute_command(command)
        if said["rc"] != 0:
            raise AnsibleActionFail(f"cannot look at {names}: {said['stderr'] or said['stdout']}")
        rows = [line.split() for line in said["stdout_lines"]]
        modes = {row[0]: tuple(row[1:]) for row in rows if len(row) == 4}
        return {row[1]: (row[0], *modes[row[1]]) for row in rows if len(row) == 2 and row[1] in modes}

    def _write(self, file: dict[str, str], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        folder = shlex.quote(str(PurePosixPath(file["path"]).parent))
        command = f"test -d {folder}" if self._task.check_mode else f"mkdir -p -m 755 {folder}"
        made = self._low_level_execute_command(command)
        if made["rc"] != 0:
            return {} if self._task.check_mode else {"failed": True, "msg": f"mkdir {folder}: {made['stderr']}"}
        task = self._task.copy()
        task.args = {("dest" if key == "path" else key): value for key, value in file.items()}
        copy = self._shared_loader_obj.action_loader.get(
            "ansible.legacy.copy", task=task, connection=self._connection, play_context=self._play_context,
            loader=self._loader, templar=self._templar, shared_loader_obj=self._shared_loader_obj,
        )  # fmt: skip
        copied: dict[str, Any] = copy.run(task_vars=task_vars)
        return copied
