"""What one sees: who says what, and when a step's line comes."""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from train import progress
from train.progress import StepLine, log, log_to_console, log_to_file
from train.seam import LOG_ONLY


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """The global logger as it was before."""
    before = list(log.handlers), log.level, log.propagate
    log.handlers.clear()
    yield
    for handler in log.handlers:
        handler.close()
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where the console goes: no terminal."""
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written, highlight=False, soft_wrap=True, width=40))
    return written


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands where it is put."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_first_rank_says_everything(screen: io.StringIO) -> None:
    log_to_console(0, 4)
    log.info("going on")
    log.warning("look out")
    log.debug("nobody asked")
    assert screen.getvalue() == "going on\nlook out\n"


def test_other_ranks_say_only_what_is_wrong_with_their_name_before_it(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_console(3, 4)
    log.info("going on")
    log.warning("look out")
    log.error("broken")
    assert screen.getvalue() == "rank 3: look out\n"
    assert capsys.readouterr().err == "rank 3: broken\n"


def test_an_agent_gets_all_that_the_other_ranks_say_marked_where_it_is_for_their_log_alone(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_console(3, 4, has_agent=True)
    log.info("going on\nand on")
    log.warning("look out")
    log.error("broken\n  at line 3")
    log.debug("nobody asked")
    assert screen.getvalue() == f"{LOG_ONLY}going on\n{LOG_ONLY}and on\nlook out\n"
    assert capsys.readouterr().err == "broken\n  at line 3\n"


def test_what_the_first_rank_says_is_for_an_agent_s_console_too(screen: io.StringIO) -> None:
    log_to_console(0, 4, has_agent=True)
    log.info("going on")
    assert screen.getvalue() == "going on\n"


def test_long_lines_and_brackets_are_printed_as_they_are(screen: io.StringIO) -> None:
    log_to_console(0, 1)
    words = "[bold]tensor[3, 4][/bold] " + "word " * 30
    log.info(words)
    assert screen.getvalue() == f"{words}\n"


def test_called_again_it_does_not_say_things_twice(screen: io.StringIO) -> None:
    log_to_console(0, 1)
    log_to_console(0, 1)
    log.info("once")
    assert screen.getvalue() == "once\n"


def test_other_peoples_loggers_are_left_alone(screen: io.StringIO) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    log_to_console(0, 1)
    assert (list(root.handlers), root.level) == before
    assert not log.propagate


def test_each_rank_has_a_log_with_time_host_and_rank(tmp_path: Path, screen: io.StringIO) -> None:
    log_to_console(2, 4)
    log_to_file(tmp_path, 1, "node-b", 2)
    log.info("going on: ä")
    log.warning("look out")
    lines = (tmp_path / "logs" / "node1-node-b" / "rank2.log").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} node-b rank 2 INFO going on: ä", lines[0])
    assert lines[1].endswith(" node-b rank 2 WARNING look out")


# The step line


def lines_of(screen: io.StringIO) -> list[str]:
    return screen.getvalue().splitlines()


def test_a_plain_line_has_step_loss_rate_speed_and_time_left(screen: io.StringIO, clock: list[float]) -> None:
    log_to_console(0, 1)
    line = StepLine(100, "bytes", shown=True)
    line.start(0)
    clock[0] += 8
    line.update(4, 1.23456, 0.0003, 12345.6)
    assert lines_of(screen) == ["step 4/100  loss 1.2346  lr 3.0e-04  12,346 bytes/s  3:12 left"]  # 96 steps at 2 s


def test_time_left_counts_the_steps_of_this_start_alone(screen: io.StringIO, clock: list[float]) -> None:
    log_to_console(0, 1)
    line = StepLine(1000, "samples", shown=True)
    line.start(900)
    clock[0] += 20
    line.update(910, 1.0, 1.0, 1.0)
    assert lines_of(screen)[0].endswith("3:00 left")


@pytest.mark.parametrize(
    ("seconds", "words"), [(1.0, "0:59"), (60.0, "59:00"), (100.0, "1:38:20"), (3661.0, "59:59:59")]
)
def test_time_left_in_minutes_and_hours(screen: io.StringIO, clock: list[float], seconds: float, words: str) -> None:
    log_to_console(0, 1)
    line = StepLine(60, "samples", shown=True)
    line.start(0)
    clock[0] += seconds
    line.update(1, 1.0, 1.0, 1.0)
    expected = int(seconds * 59)
    assert lines_of(screen)[0].endswith(f" {words} left"), expected


def test_plain_lines_come_every_few_seconds_and_the_last_step_always(screen: io.StringIO, clock: list[float]) -> None:
    log_to_console(0, 1)
    line = StepLine(10, "samples", shown=True)
    line.start(0)
    for step in range(1, 11):
        clock[0] += 2.0
        line.update(step, 1.0, 1.0, 1.0)
    line.close()
    shown = [int(words.split("/")[0].removeprefix("step ")) for words in lines_of(screen)]
    assert shown == [1, 4, 7, 10]  # at 2, 8, 14 and 20 s
    clock[0] += 0.5
    line = StepLine(3, "samples", shown=True)
    line.start(0)
    for step in (1, 2, 3):
        line.update(step, 1.0, 1.0, 1.0)
    assert [words.split()[1] for words in lines_of(screen)[4:]] == ["1/3", "3/3"]


def test_a_silent_rank_shows_no_steps(screen: io.StringIO, clock: list[float]) -> None:
    log_to_console(0, 1)
    line = StepLine(10, "samples", shown=False)
    line.start(0)
    line.update(10, 1.0, 1.0, 1.0)
    line.close()
    assert screen.getvalue() == ""


def test_a_terminal_gets_a_bar_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=120, highlight=False, _environ={"TERM": "xterm"})
    monkeypatch.setattr(progress, "console", terminal)
    log_to_console(0, 1)
    line = StepLine(10, "samples", shown=True)
    line.start(2)
    clock[0] += 1
    line.update(5, 1.5, 0.1, 10.0)
    line.close()
    line.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert "step 5/10" in text
    assert "loss 1.5000  lr 1.0e-01  10 samples/s" in text
    assert written.getvalue().endswith(("\x1b[2K", "\x1b[?25h", "\r"))  # erased, and the cursor is back
    assert written.getvalue().count("\x1b[?25l") == written.getvalue().count("\x1b[?25h")


def test_a_line_that_was_never_started_closes() -> None:
    line = StepLine(10, "samples", shown=True)
    line.close()
    assert line._bar is None
