"""Unpacks an archive of this machine on a host. Where that cannot be it is a finding: all are told at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

_FIX = {
    "No space left on device": "make room on the file system of {folder} (`df {folder}`)",
    "Disk quota exceeded": "make room on the file system of {folder} (`quota`)",
    "Read-only file system": "the file system of {folder} is mounted read-only: see `dmesg` there",
}


class ActionModule(ActionBase):  # type: ignore[misc]
    """`muster_send: {archive: PATH, folder: PATH}`: the archive here, by gzip; the folder there."""

    TRANSFERS_FILES = True
    _VALID_ARGS = frozenset(("archive", "folder"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Never fails: `unreachable_why` and `problems` tell. Nothing is left there where not all of it came."""
        super().run(tmp, task_vars)
        folder = shlex.quote(str(self._task.args["folder"]))
        command = (
            f"export LC_ALL=C; mkdir -p -m 755 {folder} && tar --no-same-owner -xzf - -C {folder} 2>&1 "
            f"|| {{ code=$?; rm -rf {folder}; exit $code; }}"
        )
        try:
            said = self._low_level_execute_command(command, in_data=Path(self._task.args["archive"]).read_bytes())
        except AnsibleConnectionFailure as error:
            return {"changed": False, "unreachable_why": _last(str(error))}
        except AnsibleError as error:
            return {"changed": False, "problems": [_last(str(error))]}
        if said["rc"] == 0:
            return {"changed": True}
        return {"changed": False, "problems": [_words(said["stdout"] + said.get("stderr", ""), folder)]}


def _words(said: str, folder: str) -> str:
    """What went wrong, and what to do."""
    for words, fix in _FIX.items():
        if words in said:
            return f"the code cannot be sent: {words[0].lower()}{words[1:]}: {fix.format(folder=folder)}"
    return f"the code cannot be sent to {folder}: {_last(said)}"


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no reason was given"
