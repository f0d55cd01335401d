"""Watches the agent of a host, as long as it lives: shows what agent 0 says, renews the lease, passes on orders.

Runs on the control machine, in a process for each host. What is asked and shown is in train/launch/polling.py.
"""

from __future__ import annotations

import contextvars
import os
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import ansible.constants as C
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

_ROOT = str(Path(__file__).resolve().parents[4])
sys.path.insert(0, _ROOT)  # until `train` is found: what else lies there must not be taken for packages
import train  # noqa: E402, F401

sys.path.remove(_ROOT)

from train.launch.polling import Answered, Polling  # noqa: E402
from train.launch.watch import Notes  # noqa: E402


class ActionModule(ActionBase):  # type: ignore[misc]
    """Options: folder, launch, host, hosts (in rank order), grace_s; ours: steps are told; follow: only look on."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Until the agent has ended, or its host is lost: `ended`, `overdue` or `lost`."""
        super().run(tmp, task_vars)
        given, parent = self._task.args, os.getppid()
        polling = Polling(
            PurePosixPath(given["folder"]) / given["launch"], given["host"], given["hosts"], float(given["grace_s"]),
            Notes(Path(C.DEFAULT_LOCAL_TMP) / "muster"), self._display.display,
            ours=bool(given.get("ours")), follow=bool(given.get("follow")),
        )  # fmt: skip
        if self._connection.transport.endswith("ssh"):
            self._connection.set_option("reconnection_retries", 0)  # a poll that fails is made again anyway
        context = contextvars.copy_context()  # Ansible's own, for the thread that asks
        how, why = polling.run(lambda command: context.run(self._ask, command), lambda: os.getppid() == parent)
        if how == "unwanted":  # without ansible-playbook itself nobody watches: let the lease end
            raise AnsibleError("ansible-playbook is gone")
        followed = bool(given.get("follow"))
        return {"changed": not followed, "how": how, "lost": how == "lost", "why": why, "times": polling.times}

    def _ask(self, command: str) -> Answered:
        answer = self._low_level_execute_command(command, sudoable=False)
        return Answered(answer["rc"], answer["stdout"], answer.get("stderr") or "")
