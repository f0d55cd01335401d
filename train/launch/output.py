"""Where the lines of ranks go: a log each, and the console.

Neither a full disk nor a stopped terminal holds up the agent: its loop only queues lines; two threads write them, one
the files, one the console. What cannot be written in time is left out and counted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from train.seam import LOG_ONLY

LAST_LINES = 40
LONGEST_LINE_BYTES = 1 << 16
_QUEUED_BYTES = 8 << 20


class Writer:
    """A thread that carries out short jobs in order; at most 8 MB of text wait for it."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._ready = threading.Condition()
        self._closing = False
        self.left_out = 0
        """Lines that found no room."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether more than half of the room is taken."""
        return self._bytes > _QUEUED_BYTES // 2

    def put(self, size: int, job: Callable[[], None], *, lines: int = 1) -> None:
        """Queue a job that writes `size` bytes, so many lines; never waits."""
        with self._ready:
            if size and self._bytes + size > _QUEUED_BYTES:
                self.left_out += lines
                return
            self._bytes += size
            self._jobs.append((size, job))
            self._ready.notify()

    def close(self, timeout_s: float) -> None:
        """Let it finish, `timeout_s` at most."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs:
                    if self._closing:
                        return
                    self._ready.wait()
                size, job = self._jobs.popleft()
                self._bytes -= size
            try:
                job()
            except Exception:
                self.left_out += 1  # whatever it was: the jobs behind it are not lost with it


class Console:
    """The agent's own standard output, line by line."""

    def __init__(self) -> None:
        self._writer = Writer("console")
        self._reported = 0

    def say(self, words: str) -> None:
        """A line of the agent itself."""
        self.line("".join(f"muster: {line}\n" for line in words.splitlines()).encode())

    def line(self, text: bytes) -> None:
        """Lines as they are, with their ends."""
        self._writer.put(len(text), lambda: _write_all(text), lines=text.count(b"\n"))
        if self._writer.left_out - self._reported >= 1000:
            self._reported = self._writer.left_out
            self.say(f"{self._reported} lines were left out here: the console does not take them; the logs have all")

    def close(self) -> None:
        """What is queued is written, if the terminal takes it."""
        self._writer.close(2.0)


def _write_all(text: bytes) -> None:
    while text:
        try:
            text = text[os.write(1, text) :]
        except BlockingIOError:  # somebody else made it so: a shared terminal or pipe
            time.sleep(0.01)
        except OSError:  # nobody reads any more
            return


class RankLog:
    """The log of one rank: kept aside until the run folder is known, then there."""

    def __init__(self, writer: Writer, aside: Path, complain: Callable[[str], None]) -> None:
        """
        Args:
            writer: the thread that writes.
            aside: file to use until `move` tells where the log belongs.
            complain: told once when it cannot be written.
        """
        self._writer = writer
        self._path = aside
        self._complain = complain
        self._file: IO[bytes] | None = None
        self._failed = False

    def lines(self, lines: Sequence[bytes]) -> None:
        """Add lines, with the time."""
        now = time.time()
        stamp = f"{time.strftime('%F %T', time.localtime(now))}.{int(now % 1 * 1000):03} ".encode()
        text = b"".join([stamp + line + b"\n" for line in lines])
        self._writer.put(len(text), lambda: self._do(lambda: self._append(text)), lines=len(lines))

    def move(self, to: Path) -> None:
        """From here on the log is there, with all that it holds already."""
        self._writer.put(0, lambda: self._do(lambda: self._move(to)))

    def close(self) -> None:
        """Close the file, after what is queued."""
        self._writer.put(0, self._close)

    def _append(self, text: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        while text:  # of a disk that is nearly full it may take a part
            text = text[self._file.write(text) :]

    def _move(self, to: Path) -> None:
        self._close()
        before = self._path.read_bytes() if self._path.exists() else b""
        aside, self._path = self._path, to
        self._append(before)
        aside.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _do(self, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._complain(f"cannot write {self._path}: {error.strerror}; its lines are on the console only")


_DUMP = b"Fatal Python error:"
_OF_A_DUMP = re.compile(r'  File "|  \.\.\.|  <|(Current t|T)hread 0x|Extension modules:|Python runtime state:|$')
"""A line that faulthandler writes after `Fatal Python error: …`."""


class RankOutput:
    """Bytes from a rank's pipe become lines: to its log, to the console, and the last of them kept."""

    def __init__(self, prefix: str, console: Console, log: RankLog) -> None:
        self._prefix = prefix.encode()
        self._console = console
        self.log = log
        self._rest = b""
        self._is_returned = False
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        """The last lines."""
        self.stack: list[str] = []
        """What faulthandler told when the rank was asked for its stacks, or crashed."""
        self.heard_s = time.monotonic()
        """When it last said something."""
        self._is_dumping = False
        self.is_shown = True
        """Whether its lines go to the console too."""

    def feed(self, data: bytes) -> None:
        """Take what came. A progress bar's `\\r` ends a line too."""
        self.heard_s = time.monotonic()
        if self._is_returned:
            data = data.removeprefix(b"\n")  # one `\r\n` that came in two pieces
        self._is_returned = data.endswith(b"\r")
        self._rest += data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._take(lines)

    def finish(self) -> None:
        """The rank is gone: what it left without a line's end."""
        if self._rest:
            self.feed(b"\n")

    def _take(self, lines: list[bytes]) -> None:
        """All that came at once: a rank may write faster than lines can be looked at one by one."""
        mark = LOG_ONLY.encode()
        bare = [line.removeprefix(mark) for line in lines]
        self.log.lines(bare)
        self._remember(bare)
        shown = [line for line in lines if not line.startswith(mark)] if self.is_shown else []
        if shown:
            self._console.line(b"".join([self._prefix + line + b"\n" for line in shown]))

    def _remember(self, lines: list[bytes]) -> None:
        if not self._is_dumping and not any(line.startswith(_DUMP) for line in lines):
            lines = [line for line in lines if line.strip()][-LAST_LINES:]
        for line in lines:
            words = line.decode("utf-8", "replace")
            if self._is_dumping and _OF_A_DUMP.match(words):
                self.stack.append(words[:400])  # not to the last lines: it would push out what was said before
                continue
            self._is_dumping = line.startswith(_DUMP)
            if self._is_dumping:
                self.stack = [words[:400]]
            if words.strip():
                self.last.append(words[:400])
