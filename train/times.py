"""Where a rank's time went, written down by itself: where an agent starts ranks, agent 0 does that for all."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from train.health import Health
from train.seam import Activity

_ROWS = 150
"""A row is as far from the one before as a part in so many of all the time yet, and a second at least."""


class TimesLog:
    """`times/rank<r>.jsonl`, rows as in an agent's `times.jsonl` with one rank each."""

    def __init__(self, path: Path, health: Health, start_id: str, rank: int, node: int) -> None:
        """
        Args:
            path: the file; rows are added to it.
            health: knows the times.
            start_id: the same on all ranks of a start.
            rank: this one's.
            node: its host's place among the hosts.
        """
        self._path, self._health, self._start_id, self._who = path, health, start_id, (rank, node)
        self._began_s = self._row_s = time.monotonic()
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
        self._write(0, None, activities=[each.words for each in Activity])

    def look(self, step: int) -> None:
        """A step is done: perhaps it is time for a row."""
        now_s = time.monotonic()
        if now_s - self._row_s >= max(1.0, (now_s - self._began_s) / _ROWS):
            self._row_s = now_s
            self._write(step, None)

    def end(self, step: int, code: int) -> None:
        """The last row."""
        self._write(step, code)

    def _write(self, step: int, code: int | None, **more: object) -> None:
        """A full disk costs the row."""
        times_ms = [round(1000 * seconds) for seconds in self._health.times_s()]
        row = [*self._who, step, int(self._health.phase), -1, code, 0, 0.0, times_ms]
        told = {"time": time.time(), "start_id": self._start_id, **more, "ranks": [row]}
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
