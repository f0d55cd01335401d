"""Without an agent each rank writes down where its time went, and rank 0 makes the page; neither can harm the run."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import train
from tests.unit.test_report_page import looked_at
from train import summary
from train.health import Health
from train.progress import log
from train.report.read import read_run
from train.times import TimesLog


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_each_second_and_then_ever_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "times" / "rank3.jsonl"
    written = TimesLog(path, Health(), "start", 3, 1)
    gaps, last = [], now[0]
    for step in range(1, 20_000):
        now[0] += 0.05
        before = path.stat().st_size
        written.look(step)
        if path.stat().st_size > before:
            gaps.append(round(now[0] - last, 2))
            last = now[0]
    assert gaps[:100] == pytest.approx([1.0] * 100, abs=0.06)
    assert gaps[-1] == pytest.approx(1000 / 150, rel=0.03)
    written.end(20_000, 75)
    first, *_, end = rows_of(path)
    assert first["activities"][0] == "loading"
    assert end["ranks"][0][:6] == [3, 1, 20_000, 0, -1, 75]
    assert len(read_run(tmp_path).samples) == len(gaps) + 2


def test_a_folder_that_cannot_be_written_costs_the_rows(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("a file")
    written = TimesLog(tmp_path / "times" / "rank0.jsonl", Health(), "start", 0, 0)
    written.look(1)
    written.end(1, 0)


def test_a_report_that_fails_is_no_matter_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Path) -> None:
        raise RuntimeError("of all things")

    monkeypatch.setattr(summary, "make_report", fails)
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        summary.report(tmp_path)
    assert "no report could be made (RuntimeError: of all things)" in caplog.text


@pytest.mark.slow
def test_a_run_of_one_process_leaves_its_page(tmp_path: Path) -> None:
    done = train("run", "--model.name=mlp", "--data.name=classification", "--batch.global_size=8", "--train.steps=30",
                 "--train.tensorboard=false", "--runs-dir", str(tmp_path), "--run-id=alone")  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = read_run(tmp_path / "alone")
    assert run.problems == []
    found = looked_at((tmp_path / "alone" / "report.html").read_text())
    assert "Finished" in found.text and "starting Python and torch" in found.text
    last = run.samples[-1].ranks[0]
    assert (last.step, last.code) == (30, 0)
    assert sum(last.seconds) > 1
