"""Watching agents from another machine: what each watcher says to its host's agent, and when it is done. Pure but for
notes in a folder, by which the watchers of one launch, a process each, know of each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

UNREACHABLE_S = 20.0
"""A host that does not answer for so long is given up; the job stops."""
AFTER_THE_OTHERS_S = 5.0
"""Once the others have ended, no longer than this."""
ALONE_S = 12.0
"""An agent has ended, and the others have not noticed by then: they are asked to stop."""
OVERDUE_S = 20.0
"""So much more than the grace before what is left is killed."""
KILL_S = 10.0


class Note(NamedTuple):
    """What somebody noted."""

    text: str
    at_s: float


class Notes:
    """A folder of notes; the first of a name stands. Times are the machine's monotonic clock, which processes share."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self.clock = clock

    def write(self, name: str, text: str = "", at_s: float | None = None) -> None:
        """Note it, unless it was noted before; now, or for another time."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = self._folder / f".{name}.{time.monotonic_ns()}"
            aside.write_text(f"{self.clock() if at_s is None else at_s}\n{text}", encoding="utf-8")
            try:
                (self._folder / name).hardlink_to(aside)
            finally:
                aside.unlink()

    def read(self, name: str) -> Note | None:
        """What was noted, if it was."""
        try:
            at_s, _, text = (self._folder / name).read_text(encoding="utf-8").partition("\n")
        except OSError:
            return None
        return Note(text, float(at_s))


class Watch:
    """The watcher of one host."""

    def __init__(
        self, host: str, hosts: Sequence[str], notes: Notes, grace_s: float, unreachable_s: float = UNREACHABLE_S,
        *, only_looks: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            host: whose agent it watches.
            hosts: all hosts of the launch.
            notes: shared by the watchers of all of them.
            grace_s: how long agents may take to save.
            unreachable_s: a host that does not answer for so long is given up.
            only_looks: follows somebody else's job: nothing that it sees or misses may end that.
        """
        self._only_looks = only_looks
        self.host = host
        self._unreachable_s = unreachable_s
        self._others = [name for name in hosts if name != host]
        self._notes = notes
        self._grace_s = grace_s
        self._heard_s = notes.clock()

    def order(self) -> str:
        """What to write into the lease; nothing: go on."""
        if self._only_looks:
            return ""
        kill, stop = self._notes.read("kill"), self._notes.read("stop")
        if kill is not None:
            return f"kill {kill.text}"
        if stop is None:
            gone = [name for name in self._others if self._is_old(f"{name}.ended", ALONE_S)]
            if gone:
                self._notes.write("stop", f"the launcher, for the agent of {gone[0]} has ended")
                stop = self._notes.read("stop")
        return "" if stop is None else f"stop {stop.text}"

    def heard(self, *, alive: bool) -> str | None:
        """The host answered; `ended` or `overdue` where that is all."""
        self._heard_s = self._notes.clock()
        if not alive:
            self._notes.write(f"{self.host}.ended")
            return "ended"
        if self._only_looks:
            return None
        if self._is_old("kill", KILL_S) or self._is_old("stop", self._grace_s + OVERDUE_S):
            return "overdue"
        return None

    def unheard(self, why: str) -> str | None:
        """The host has not answered; `lost` where that has gone on for too long."""
        silent_s = self._notes.clock() - self._heard_s
        done = [name for name in self._others if self._notes.read(f"{name}.ended") or self._notes.read(f"{name}.lost")]
        is_last = bool(self._others) and len(done) == len(self._others)
        if silent_s <= (AFTER_THE_OTHERS_S if is_last else self._unreachable_s):
            return None
        if self._only_looks:
            return "lost"
        self._notes.write(f"{self.host}.lost", why)
        self._notes.write("stop", f"the launcher, which cannot reach {self.host}")
        return "lost"

    def _is_old(self, name: str, age_s: float) -> bool:
        note = self._notes.read(name)
        return note is not None and self._notes.clock() - note.at_s > age_s
