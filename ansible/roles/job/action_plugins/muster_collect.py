"""Brings what is new in a run's folder on a host to this machine, by whatever connection Ansible has to it."""

from __future__ import annotations

import base64
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

_ROOT = str(Path(__file__).resolve().parents[4])
sys.path.insert(0, _ROOT)  # until `train` is found: what else lies there must not be taken for packages
import train  # noqa: E402, F401

sys.path.remove(_ROOT)

from train.launch.collect import bring  # noqa: E402


class ActionModule(ActionBase):  # type: ignore[misc]
    """Options: run (a folder on the host), results (here), whole, checkpoints; folder, launch, label: the console's."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Changed where something was new; `dest` says where it is."""
        super().run(tmp, task_vars)
        given = self._task.args
        launch = str(PurePosixPath(given["folder"]) / given["launch"])
        try:
            dest, files = bring(
                self._bytes, given["run"], launch, Path(given["results"]), str(given["label"]),
                whole=bool(given.get("whole")), checkpoints=bool(given.get("checkpoints", True)),
            )  # fmt: skip
        except ValueError as error:
            raise AnsibleActionFail(str(error)) from None
        bytes_ = sum(file.size for file in files)
        return {"changed": bool(files), "dest": str(dest), "brought": len(files), "bytes": bytes_}

    def _bytes(self, command: str, stdin: bytes) -> bytes:
        """What a command on the host writes. With something on its stdin it gets no terminal, which would change it."""
        for patience in (1, 0):
            try:
                answer = self._low_level_execute_command(f"{{ {command}; }} | base64 -w 0", in_data=stdin or b"\n")
                break
            except AnsibleConnectionFailure:
                if not patience:
                    raise
        try:
            return base64.b64decode(answer["stdout"].strip(), validate=True)
        except ValueError:
            raise AnsibleActionFail(f"{command}: {answer['stdout'][-300:]}") from None
