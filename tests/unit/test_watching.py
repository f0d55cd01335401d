"""`train watch`: one look at a run, in whatever state it is; and looking on until it ends or one has seen enough."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.ranks import ROOT, clean_environment
from tests.synthetic import of_many, times_row, with_a_restart, write_lines
from train.seam import Activity, Exit
from train.watching import Watcher, main

TOTAL = {Activity.LOADING: 4.0, Activity.JOINING: 1.0, Activity.PREPARING: 1.0, Activity.FIRST_STEP: 1.0}


def running(folder: Path, *, time_s: float = 170.0, **more: Any) -> Path:
    """The second start of that run, 12 s after the last row: at step 42, 20 steps a rank later."""
    path = with_a_restart(folder / "run")
    rows = [json.loads(line) for line in (path / "times.jsonl").read_text().splitlines()]
    write_lines(path / "times.jsonl", rows[:-1])
    (path / "verdict.json").unlink()
    told = [
        (0, 0, 50, {**TOTAL, Activity.COMPUTING: 7.0, Activity.WAITING: 4.0}),
        (1, 1, 50, {**TOTAL, Activity.COMPUTING: 10.0, Activity.WAITING: 1.0}),
    ]
    hosts = [["alpha", False, 0.1], ["beta", False, 0.2]]
    (path / "live.json").write_text(
        json.dumps({**times_row(time_s, "bbb", told), "restarts": 1, "hosts": hosts, **more})
    )
    return path


def shown(path: Path, now: float = 171.0, width: int = 120) -> list[str]:
    console = Console(width=width, record=True, file=StringIO(), highlight=False)
    console.print(Watcher(path).look(now))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_each_rank_has_a_line_with_what_is_its_own_and_what_is_waiting(tmp_path: Path) -> None:
    lines = shown(running(tmp_path))
    assert lines[0] == "run: step 50 of 60, restart 1"
    assert lines[1].split() == ["host", "rank", "step", "phase", "a", "step", "own", "waits", "memory", "saved"]
    # From step 30 to 50: rank 0 computed for 2 s and waited for 4 s, rank 1 for 5 s and 1 s.
    assert lines[2].split() == ["alpha", "0", "50", "step", "20", "ms", "100", "ms", "200", "ms", "300", "MB", "–"]
    assert lines[3].split() == ["beta", "1", "50", "step", "20", "ms", "250", "ms", "50", "ms", "300", "MB", "–"]
    assert lines[4] == "rank 1 holds up the others: 2.5 times the median rank's own part of a step"
    assert lines[-1].split()[1:] == ["verdict", "outcome", "finished"]  # the last events, whatever they are


def test_many_ranks_are_told_by_host(tmp_path: Path) -> None:
    path = of_many(tmp_path / "run", 256, slow=77, samples=12)
    lines = shown(path, now=163.0)
    assert lines[0] == "run: step 500"
    assert len([line for line in lines if line.startswith("host")]) == 1 + 32
    (line,) = [line for line in lines if line.startswith("host09")]
    assert line.split()[:4] == ["host09", "72–79,", "slowest", "77"]
    assert "rank 77 holds up the others: 3.0 times" in "\n".join(lines)


def test_silence_losses_and_ends_are_told(tmp_path: Path) -> None:
    path = running(tmp_path, hosts=[["alpha", False, 0.1], ["beta", True, 9.0]])
    assert shown(path, now=190.0)[0].endswith("nothing heard for 20.0 s: its agent 0 is gone, or frozen")
    assert shown(path)[3].split()[3:5] == ["host", "lost"]
    verdict = {"outcome": "failed", "exit_code": 7, "cause": "host beta was lost", "step": 42}
    (path / "verdict.json").write_text(json.dumps(verdict))
    assert shown(path, now=999.0)[0] == "run: host beta was lost (exit code 7)"


def test_names_are_no_markup_and_no_escapes(tmp_path: Path) -> None:
    path = running(tmp_path)
    events = (path / "events.jsonl").read_text().replace("alpha", "[red]a\\u001b[2J")
    (path / "events.jsonl").write_text(events)
    text = "\n".join(shown(path))
    assert "[red]a [2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"time": 1}', '{"time": 170, "start_id": 7, "ranks": [[]]}'])
def test_a_damaged_file_leaves_the_rest(damage: str, tmp_path: Path) -> None:
    path = running(tmp_path)
    (path / "live.json").write_text(damage)
    lines = shown(path)
    assert lines[0].startswith("run: step 30")  # the last row of times.jsonl
    for name in ("events.jsonl", "times.jsonl", "plan.json", "config.yaml"):
        (path / name).write_text(damage)
    assert shown(path)[0] == "run: its ranks have told nothing yet"


def test_without_an_agent_ranks_tell_themselves(tmp_path: Path) -> None:
    path = running(tmp_path)
    (path / "live.json").unlink()
    (path / "times").mkdir()
    for rank in range(2):
        rows = [
            times_row(160.0 + 10 * i + rank / 10, "x", [(rank, 0, 9 * i, {**TOTAL, Activity.DATA: 9.0 * i})])
            for i in (1, 2)
        ]
        write_lines(path / "times" / f"rank{rank}.jsonl", rows)
    lines = shown(path, now=181.0)
    assert lines[0] == "run: step 18 of 60"
    assert [line.split()[6:8] for line in lines[2:4]] == [["1000", "ms"]] * 2


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none", "--runs-dir", str(tmp_path)]) == Exit.USAGE
    assert "there is no run 'none'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main([]) == Exit.USAGE


class Terminal:
    """`watch` on a terminal of its own."""

    def __init__(self, path: Path) -> None:
        self._inner, outer = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "train", "watch", str(path)], stdin=outer, stdout=outer, stderr=outer, cwd=ROOT,
            env=clean_environment(TERM="xterm"), start_new_session=True,
        )  # fmt: skip
        os.close(outer)
        self.said = ""

    def until(self, words: str) -> None:
        deadline = time.monotonic() + 30
        while words not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self._inner], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self._inner, 1 << 16).decode(errors="replace")
                except OSError:
                    assert words in self.said, self.said
                    return

    def end(self) -> int:
        try:
            self.until("\x1b[?25h")  # the cursor is there again
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._inner)


def test_ctrl_c_leaves_the_run_alone(tmp_path: Path) -> None:
    path = running(tmp_path, time_s=time.time())
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    terminal = Terminal(path)
    terminal.until("step 50 of 60")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.said
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_it_follows_and_ends_with_the_run(tmp_path: Path) -> None:
    path = running(tmp_path, time_s=time.time())
    terminal = Terminal(path)
    terminal.until("step 50 of 60")
    live = (path / "live.json").read_text()
    (path / "live.json").write_text(live.replace(" 50,", " 57,"))
    terminal.until("step 57 of 60")
    (path / "verdict.json").write_text(json.dumps({"outcome": "finished", "exit_code": 0, "step": 60}))
    terminal.until("finished at step 60")
    assert terminal.end() == 0
