"""Asks a host by the module muster_agent; a host that cannot be reached is a finding like others.

So all hosts are looked at, and all that is wrong is told at once, before anything is started anywhere.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):  # type: ignore[misc]
    """The options are those of muster_agent; `state` is probed, listed or asked."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Never fails: `unreachable_why` and `problems` tell."""
        super().run(tmp, task_vars)
        began_s = time.monotonic()
        try:
            arguments = {"state": "probed", **self._task.args}
            told = self._execute_module("muster_agent", arguments, task_vars=task_vars)
            clock = self._clock()  # second: making a connection takes long
        except AnsibleConnectionFailure as error:
            return {"changed": False, "unreachable_why": _last_line(error)}
        except AnsibleError as error:
            return {"changed": False, "problems": [_last_line(error)]}
        if told.get("failed"):
            why = told.get("module_stderr") or told.get("msg") or "it did not answer"
            return {"changed": False, "problems": [_last_line(why)], **clock}
        return {**told, **clock, "probe_s": time.monotonic() - began_s}

    def _clock(self) -> dict[str, Any]:
        """How far the host's clock is from this machine's, within half the way there and back; who looks."""
        sent_s = time.time()
        answer = self._low_level_execute_command("date +%s.%N; id -u; id -g", sudoable=False)
        came_s = time.time()
        words = answer["stdout"].split()
        if len(words) != 3:
            raise AnsibleError(f"it has no shell that answers: {answer['stdout']}{answer.get('stderr', '')}")
        ahead_s = float(words[0]) - (sent_s + came_s) / 2
        watcher = [int(words[1]), int(words[2])]
        return {"ahead_s": round(ahead_s, 3), "ahead_within_s": round((came_s - sent_s) / 2, 3), "watcher": watcher}


def _last_line(why: object) -> str:
    lines = [line.strip() for line in str(why).splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "no reason was given"
