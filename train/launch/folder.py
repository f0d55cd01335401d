"""The run folder as agents see it: logs, events, plan and verdict, once it is known which folder it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from train.errors import UsageError
from train.launch.output import Writer
from train.seam import LIVE_FILE, STOP_FILE, TIMES_FILE

_OWN = ("plan.json", "events.jsonl", LIVE_FILE, TIMES_FILE, ".lock")


class Folder:
    """`runs/<run_id>/`. What is told before the folder is known is kept until then."""

    def __init__(self, writer: Writer, node_rank: int) -> None:
        """
        Args:
            writer: the thread that writes.
            node_rank: of this agent; agent 0 keeps `events.jsonl`, `plan.json` and `verdict.json`.
        """
        self._writer = writer
        self._node_rank = node_rank
        self._waiting: list[tuple[str, str]] = []
        self._lock: IO[str] | None = None
        self._is_new = False
        self._began_s = time.monotonic()
        self.path: Path | None = None

    def is_at(self, path: Path, start_id: str = "") -> None:
        """This is the folder. Raises UsageError where another job's agent of this node rank has it."""
        self._hold(path)
        self.path = path
        self.forget_verdict(start_id)
        for name, text in self._waiting:
            self._append(name, text)
        self._waiting = []

    def _hold(self, path: Path) -> None:
        """For as long as this process lives: a lock that `stop` looks at, and that a second job meets."""
        self._is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / f".agent{self._node_rank}.lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--runs-dir: cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            raise UsageError(
                f"--run-id: run {path.name} is in use by {holder}: stop that job, or give another --run-id"
            ) from None
        except OSError:  # a file system without locks
            return
        self._lock = lock
        with contextlib.suppress(OSError):  # on a full disk it holds all the same
            lock.truncate(0)
            lock.write(f"agent {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}\n")
            lock.flush()

    def record(self, event: str, **facts: Any) -> None:
        """Add a line to `events.jsonl`."""
        if self._node_rank == 0:
            self.add("events.jsonl", event=event, **facts)

    def add(self, name: str, **facts: Any) -> None:
        """Add a line to a file of JSON lines, with the time."""
        self._append(name, json.dumps({**self._now(), **facts}) + "\n")

    def tell_live(self, **facts: Any) -> None:
        """Write `live.json`, what there is to see just now; missed where the disk is slow or full."""
        if self.path is not None:
            path, text = self.path / LIVE_FILE, json.dumps({**self._now(), **facts}) + "\n"
            self._writer.put(len(text), lambda: _replace(path, text))

    def _now(self) -> dict[str, float]:
        return {"time": time.time(), "t_s": round(time.monotonic() - self._began_s, 3)}

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        if self.path is not None:
            path, text = self.path / name, json.dumps(content, indent=1) + "\n"
            self._writer.put(0, lambda: _replace(path, text))  # 0: it must find room behind whatever ranks print

    def conclude(self, verdict: Mapping[str, Any], *, replace: bool) -> None:
        """Write `verdict.json`; without `replace` only where there is none: who sees less yields to agent 0."""
        if self.path is not None and (replace or not (self.path / "verdict.json").exists()):
            self.write("verdict.json", verdict)

    def discard(self) -> None:
        """Nothing was started: what the agent put into a new folder goes again; what ranks put there stays."""
        if self.path is not None and self._is_new:
            path, self.path = self.path, None
            self._writer.put(0, lambda: _take_back(path))

    def forget_verdict(self, start_id: str) -> None:
        """The run goes on: what is said of its end is not true any more, unless it is of this very start."""
        if self.path is None:
            return
        file = self.path / "verdict.json"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if start_id and json.loads(file.read_text(encoding="utf-8")).get("start_id") == start_id:
                return
        with contextlib.suppress(OSError):
            file.unlink()

    def take_stop_file(self) -> bool:
        """Whether somebody put a STOP file there; it is gone then."""
        if self.path is None:
            return False
        try:
            (self.path / STOP_FILE).unlink()
        except OSError:
            return False
        return True

    def _append(self, name: str, text: str) -> None:
        if self.path is None:
            self._waiting.append((name, text))
            return
        path = self.path / name
        self._writer.put(0, lambda: _append(path, text))


def _take_back(path: Path) -> None:
    """Remove the agents' own files, and the folder if that leaves it empty."""
    if (path / "environment.json").exists():  # a run of ours has begun there
        return
    shutil.rmtree(path / "logs", ignore_errors=True)
    for file in (*(path / name for name in _OWN), *path.glob(".agent*.lock")):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _append(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # the logs say that the disk is full; what happened is on the console too


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
