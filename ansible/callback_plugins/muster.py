"""Says the last word, behind Ansible's recap, and makes Ctrl-C stop the job in place of the playbook.

The last word is the statistic `muster_last_words` (ansible.builtin.set_stats). Ctrl-C belongs to the job during tasks
that have the variable `muster_ctrl_c`: by itself Ansible kills its workers at the first one, and would leave the job
to its lease. A task with `muster_ends: NAME` begins where a part of the time to the first step ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ansible.constants as C
from ansible.plugins.callback import CallbackBase

_ROOT = str(Path(__file__).resolve().parent.parent.parent)
sys.path.insert(0, _ROOT)  # until `train` is found: what else lies there must not be taken for packages
import train  # noqa: E402, F401

sys.path.remove(_ROOT)

from train.launch.watch import Notes  # noqa: E402

DOCUMENTATION = """
name: muster
type: aggregate
short_description: Muster's last word, and its Ctrl-C
description: See the comment above.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Works beside whatever callback shows the rest."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "muster"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before: dict[int, Any] = {}
        self._asked = 0
        self._notes = Notes(Path(C.DEFAULT_LOCAL_TMP) / "muster")
        self._notes.write("time.enter", at_s=_began_s())

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """The next task begins."""
        variables = task.get_vars()
        if "muster_ends" in variables:
            self._notes.write(f"time.{variables['muster_ends']}")
        if variables.get("muster_ctrl_c"):
            if not self._before:
                self._before = {number: signal.signal(number, self._interrupted) for number in SIGNALS}
        else:
            self._give_back()

    def v2_playbook_on_no_hosts_matched(self) -> None:
        """By itself Ansible finds nothing wrong with that."""
        self._display.display("muster: nothing was done: the inventory has no hosts for it (-i inventory/hosts.yml)")
        raise SystemExit(2)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """All is over."""
        self._give_back()
        words = stats.custom.get("_run", {}).get("muster_last_words")
        for line in [words] if isinstance(words, str) else words or ():
            self._display.display(str(line))

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _interrupted(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:  # the terminal is gone; whoever wrote to it would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
        self._asked += 1
        who = "Ctrl-C" if number == signal.SIGINT else f"{signal.Signals(number).name} at the launcher"
        if self._asked == 1:
            self._notes.write("stop", who)
        elif self._asked == 2:
            self._notes.write("kill", f"a second {who}")
        else:
            self._give_back()
            os.kill(os.getpid(), number)
        say = ("", "stopping the job; again: ends it at once, unsaved", "ending the job at once", "leaving")
        os.write(sys.stderr.fileno(), f"\nmuster: {say[min(self._asked, 3)]}\n".encode())


def _began_s() -> float:
    """When this process began, on the monotonic clock; now, where that cannot be told."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
