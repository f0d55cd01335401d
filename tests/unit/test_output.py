"""Lines of ranks on their way to logs and console: none is lost, none holds up the agent."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment
from train.launch import output
from train.launch.output import LAST_LINES, LONGEST_LINE_BYTES, RankLog, RankOutput, Writer
from train.seam import LOG_ONLY

STAMP = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ")


class Screen:
    """A console that keeps what it was given."""

    def __init__(self) -> None:
        self.shown = b""
        self.said: list[str] = []

    def line(self, text: bytes) -> None:
        self.shown += text

    def say(self, words: str) -> None:
        self.said.append(words)

    def close(self) -> None:
        pass


class Desk:
    """A rank's output, its log and a console."""

    def __init__(self, folder: Path, prefix: str = "rank 3 | ") -> None:
        self.screen = Screen()
        self.writer = Writer("logs")
        self.path = folder / "aside" / "rank3.log"
        self.log = RankLog(self.writer, self.path, self.screen.say)
        self.output = RankOutput(prefix, self.screen, self.log)  # type: ignore[arg-type]

    def feed(self, *pieces: bytes, finish: bool = True) -> None:
        for piece in pieces:
            self.output.feed(piece)
        if finish:
            self.output.finish()

    def logged(self, path: Path | None = None) -> list[bytes]:
        """Lines of the log without their times."""
        settle(self.writer)
        text = (path or self.path).read_bytes()
        lines = text.split(b"\n")
        assert lines[-1] == b""
        assert all(STAMP.match(line) for line in lines[:-1])
        return [STAMP.sub(b"", line, count=1) for line in lines[:-1]]


def settle(writer: Writer) -> None:
    done = threading.Event()
    writer.put(0, done.set)
    assert done.wait(10)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.writer.close(5)


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"o", b"ne", b"\nt", b"wo\n"], [b"one", b"two"]),
        ([b"no end"], [b"no end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"10%\r20%\r30%\n"], [b"10%", b"20%", b"30%"]),
        ([b"windows\r\nlines\r\n"], [b"windows", b"lines"]),
        ([b"windows\r", b"\nin pieces\r", b"\n"], [b"windows", b"in pieces"]),
        ([b"10%\r", b"20%\r", b"\r"], [b"10%", b"20%", b""]),
        ([b"\xff\xfe\x00 no text\n"], [b"\xff\xfe\x00 no text"]),
        (["ü".encode()[:1], "ü".encode()[1:] + b"\n"], ["ü".encode()]),
        ([b"a\x0bb\x0cc\x1cd\xc2\x85e\n"], [b"a\x0bb\x0cc\x1cd\xc2\x85e"]),
        ([], []),
    ],
)
def test_lines(desk: Desk, pieces: list[bytes], lines: list[bytes]) -> None:
    desk.feed(*pieces)
    assert desk.screen.shown == b"".join(b"rank 3 | " + line + b"\n" for line in lines)
    assert desk.logged() == lines if lines else not desk.path.exists()


def test_a_line_is_shown_when_it_is_whole(desk: Desk) -> None:
    desk.feed(b"half", finish=False)
    assert desk.screen.shown == b""
    desk.feed(b" a line\nnext", finish=False)
    assert desk.screen.shown == b"rank 3 | half a line\n"


def test_a_progress_bar_is_shown_as_it_comes(desk: Desk) -> None:
    desk.feed(b"10%\r", finish=False)
    assert desk.screen.shown == b"rank 3 | 10%\n"


def test_a_very_long_line_is_cut_and_nothing_of_it_lost(desk: Desk) -> None:
    long = os.urandom(500_000).hex().encode()
    desk.feed(*(long[at : at + 65536] for at in range(0, len(long), 65536)), b"\nafter\n")
    lines = desk.logged()
    assert b"".join(lines[:-1]) == long
    assert lines[-1] == b"after"
    assert max(map(len, lines)) <= LONGEST_LINE_BYTES + 65536
    assert all(len(line) <= 2000 for line in desk.output.last)


def test_what_is_for_the_log_alone_is_not_shown(desk: Desk) -> None:
    desk.feed(f"{LOG_ONLY}hidden\nseen\n{LOG_ONLY}hidden too\n".encode())
    assert desk.screen.shown == b"rank 3 | seen\n"
    assert desk.logged() == [b"hidden", b"seen", b"hidden too"]
    assert list(desk.output.last) == ["hidden", "seen", "hidden too"]


def test_the_last_lines_are_kept_and_empty_ones_are_not(desk: Desk) -> None:
    desk.feed(b"".join(b"line %d\n\n  \n" % number for number in range(100)))
    assert list(desk.output.last) == [f"line {number}" for number in range(100 - LAST_LINES, 100)]


DUMP = b"""Fatal Python error: Aborted

Current thread 0x00007f0000000000 (most recent call first):
  File "/home/me/data.py", line 88 in read
  File "/home/me/train.py", line 5 in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


def test_a_stack_is_kept_apart_so_that_it_pushes_out_no_last_line(desk: Desk) -> None:
    desk.feed(b"the cause\n", DUMP)
    assert desk.output.stack[0] == "Fatal Python error: Aborted"
    assert '  File "/home/me/data.py", line 88 in read' in desk.output.stack
    assert list(desk.output.last) == ["the cause", "Fatal Python error: Aborted"]
    desk.feed(b"somebody else's line\n")
    assert "somebody else's line" not in desk.output.stack
    assert desk.output.last[-1] == "somebody else's line"


def test_when_it_said_something_last(desk: Desk) -> None:
    before = desk.output.heard_s
    time.sleep(0.01)
    desk.feed(b"no whole line", finish=False)
    assert desk.output.heard_s > before


def test_a_hidden_rank_is_logged(desk: Desk) -> None:
    desk.output.is_shown = False
    desk.feed(b"quiet\n")
    assert desk.screen.shown == b""
    assert desk.logged() == [b"quiet"]


# The log.


def test_a_log_moves_to_the_run_folder_with_what_it_holds(desk: Desk, tmp_path: Path) -> None:
    to = tmp_path / "runs" / "r" / "logs" / "rank3.log"
    desk.feed(b"before\n")
    desk.log.move(to)
    desk.feed(b"after\n")
    assert desk.logged(to) == [b"before", b"after"]
    assert not desk.path.exists()


def test_a_log_of_a_restart_goes_on_behind_the_old_one(tmp_path: Path) -> None:
    to = tmp_path / "rank3.log"
    for words in (b"first start\n", b"second start\n"):
        desk = Desk(tmp_path)
        desk.log.move(to)
        desk.feed(words)
        desk.log.close()
        desk.writer.close(5)
    assert [STAMP.sub(b"", line) for line in to.read_bytes().splitlines()] == [b"first start", b"second start"]


def test_a_log_that_never_had_a_line_is_there_all_the_same(desk: Desk, tmp_path: Path) -> None:
    desk.log.move(tmp_path / "there.log")
    assert desk.logged(tmp_path / "there.log") == []


class Full:
    """A file on a disk without room."""

    def write(self, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        pass


def test_a_full_disk_is_told_once_and_the_console_goes_on(desk: Desk) -> None:
    desk.feed(b"well\n")
    settle(desk.writer)
    desk.log._file = Full()  # type: ignore[assignment]
    desk.feed(*(b"line %d\n" % number for number in range(50)))
    settle(desk.writer)
    assert desk.screen.said == [
        f"cannot write {desk.path}: No space left on device; its lines are on the console only",
    ]
    assert desk.screen.shown.count(b"line ") == 50


def test_a_log_where_no_folder_can_be_is_told(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    desk.feed(b"one\n")
    desk.log.move(tmp_path / "file" / "rank3.log")
    desk.feed(b"two\n")
    settle(desk.writer)
    assert len(desk.screen.said) == 1
    assert "File exists" in desk.screen.said[0]


# The writer.


def test_jobs_are_done_in_order_and_a_bad_one_does_not_end_it() -> None:
    writer, done = Writer("test"), []

    def fail() -> None:
        raise ValueError("whatever")

    writer.put(1, lambda: done.append(1))
    writer.put(1, fail)
    writer.put(1, lambda: done.append(2))
    writer.close(5)
    assert done == [1, 2]


def blocked() -> tuple[Writer, threading.Event]:
    writer, go_on, began = Writer("test"), threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait(20)

    writer.put(0, wait)
    assert began.wait(5)
    return writer, go_on


def test_what_finds_no_room_is_left_out_and_counted_but_files_of_the_agent_find_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "_QUEUED_BYTES", 1000)
    writer, go_on = blocked()
    done: list[int] = []
    for number in range(15):
        writer.put(100, lambda number=number: done.append(number))  # type: ignore[misc]
    assert writer.is_full
    assert writer.left_out == 5
    writer.put(0, lambda: done.append(99))  # the verdict
    go_on.set()
    writer.close(5)
    assert done == [*range(10), 99]
    assert not writer.is_full


def test_closing_waits_so_long_and_not_longer() -> None:
    writer, go_on = blocked()
    began_s = time.monotonic()
    writer.close(0.2)
    assert time.monotonic() - began_s < 2
    go_on.set()


# The console, in a process of its own: it writes to descriptor 1.

SCRIPT = """
import os, sys, threading, time
from train.launch.output import Console
console = Console()
exec(sys.stdin.read())
"""


def console(act: str, stdout: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=clean_environment(), text=True,
        stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(act)
    process.stdin.close()
    return process


def test_a_console_that_nobody_reads_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    act = (
        "began = time.monotonic()\n"
        "for _ in range(100): console.line(b'x' * 100_000 + b'\\n')\n"
        "queued = time.monotonic() - began\n"
        "console.close()\n"
        "print(queued < 1, time.monotonic() - began < 4, file=sys.stderr)\n"
        "os._exit(0)\n"
    )
    process = console(act, writing)
    os.close(writing)
    assert process.stderr is not None
    assert process.stderr.read().split() == ["True", "True"]
    process.wait(10)
    os.close(reading)


def test_a_console_that_is_read_late_gets_all_that_waited() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as a terminal is that another program has left so
    process = console("for n in range(3000): console.line(b'%d %s\\n' % (n, b'x' * 100))\nconsole.close()\n", writing)
    os.close(writing)
    time.sleep(0.3)
    with os.fdopen(reading, "rb") as file:
        lines = file.read().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(3000))
    process.wait(10)


def test_a_console_whose_reader_is_gone_ends_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = console("console.say('two\\nlines')\nconsole.close()\nprint('alive', file=sys.stderr)\n", writing)
    os.close(writing)
    assert process.stderr is not None
    assert process.stderr.read().strip() == "alive"
    assert process.wait(10) == 0


def test_the_agents_own_words_are_marked() -> None:
    process = console("console.say('two\\nlines')\nconsole.close()\n", subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read() == "muster: two\nmuster: lines\n"
    process.wait(10)
