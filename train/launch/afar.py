"""What a launcher on another machine sees of an agent, its heartbeat, and says to it, by a lease: files, no port."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOOK_S = 0.25
FIRST_S = 120.0
"""For the first renewal: whoever watches waits until all hosts' agents have been started."""
_LONGEST_TEXT = 300


class Request(NamedTuple):
    """Somebody asks the job to stop."""

    by: str
    now: bool
    """At once, unsaved."""


class Lease:
    """A file that whoever watches the job touches again and again.

    Not touched for too long, and whoever watched is gone: the job is asked to stop. `stop WHO` in it asks too, and
    `kill WHO` ends the job at once. When it was touched is told by this agent's own clock, so that wrong clocks do no
    harm.
    """

    def __init__(self, file: Path, patience_s: float | None) -> None:
        """
        Args:
            file: the lease; it may come to be later.
            patience_s: how long it may be left alone; None: for ever.
        """
        self._file = file
        self._patience_s = patience_s
        self._touched: tuple[int, int] | None = None
        self._touched_s: float | None = None
        self._is_renewed = False
        self._told: set[Request] = set()

    def look(self, now_s: float) -> Request | None:
        """A request that was not there before. Call it several times a second."""
        touched, text = self._touched, ""
        with contextlib.suppress(OSError):
            found = self._file.stat()
            touched = (found.st_mtime_ns, found.st_size)
        if self._touched_s is None:
            self._touched_s = now_s
        elif touched != self._touched:
            self._touched_s, self._is_renewed = now_s, True
        if touched != self._touched:
            self._touched = touched
            with contextlib.suppress(OSError):
                text = self._file.open(encoding="utf-8", errors="replace").readline(_LONGEST_TEXT)
        request = self._order(text) or self._end(now_s)
        if request is None or request in self._told:
            return None
        self._told.add(request)
        return request

    def _order(self, text: str) -> Request | None:
        word, _, who = "".join(letter if letter.isprintable() else " " for letter in text).strip().partition(" ")
        if word not in ("stop", "kill"):
            return None
        return Request(who.strip() or "whoever holds the lease", word == "kill")

    def _end(self, now_s: float) -> Request | None:
        if self._patience_s is None or self._touched_s is None:
            return None
        patience_s = self._patience_s if self._is_renewed else max(self._patience_s, FIRST_S)
        if now_s - self._touched_s <= patience_s:
            return None
        return Request(f"the end of its lease (whoever watched is gone for {patience_s:g} s)", False)


def slowest(ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """How far the last of these ranks is: rows of a beat (rank, whether ours, step, phase, …)."""
    last = min((row for row in ranks if row[1]), key=lambda row: row[2], default=None)
    return {} if last is None else {"step": last[2], "phase": last[3].words}


def write_heartbeat(file: Path, run: Path | None, start_id: str, progress: Mapping[str, Any]) -> None:
    """Say that the agent lives, and how far it is.

    Args:
        file: where; replaced as a whole.
        run: the run folder, once it is known.
        start_id: of this start; empty before.
        progress: step and phase, where they are known.
    """
    told = {"time": time.time(), "run": str(run) if run else None, "start_id": start_id or None, **progress}
    aside = file.with_name(f".{file.name}.new")
    with contextlib.suppress(OSError):
        aside.write_text(json.dumps(told) + "\n", encoding="utf-8")
        aside.replace(file)
