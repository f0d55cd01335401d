"""metrics.jsonl: its rows, and what is cut off when a run goes on from an earlier step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.metrics import Metrics


def write(folder: Path, *steps: int, after_step: int = 0, tensorboard: bool = False) -> None:
    metrics = Metrics(folder, after_step=after_step, tensorboard=tensorboard)
    for step in steps:
        metrics.write(step, {"loss": step / 10})
    metrics.close()


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_is_one_line_of_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, after_step=0, tensorboard=False)
    metrics.write(10, {"time_s": 1.5, "loss": 0.25, "lr": 1e-5})
    content = (tmp_path / "metrics.jsonl").read_text()  # before it is closed: a crash loses no row
    metrics.close()
    assert content.endswith("\n")
    assert json.loads(content) == {"step": 10, "time_s": 1.5, "loss": 0.25, "lr": 1e-5}


def test_rows_after_the_step_a_run_goes_on_from_are_cut_off(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 20, 30, 40)
    write(tmp_path, 30, 40, 50, after_step=20)
    assert steps_in(tmp_path) == [10, 20, 20, 30, 40, 50]


def test_a_run_that_starts_anew_keeps_none_of_the_rows_before(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    write(tmp_path, 5, after_step=0)
    assert steps_in(tmp_path) == [5]


def test_what_goes_on_from_the_last_row_loses_none(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    before = (tmp_path / "metrics.jsonl").read_text()
    write(tmp_path, after_step=20)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("broken", ['{"step": 15, "lo', '{"step": 1', '{"loss": 1}', "17", '{"step": "x"}', "\x00\x00"])
def test_a_line_broken_by_a_crash_is_dropped(tmp_path: Path, broken: str) -> None:
    write(tmp_path, 10)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(broken)
    write(tmp_path, 20, after_step=15)
    assert steps_in(tmp_path) == [10, 20]


def test_a_line_broken_by_a_failing_disk_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 10)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 15, "\xff\xfe')
    write(tmp_path, 20, after_step=15)
    assert steps_in(tmp_path) == [10, 20]


def test_nothing_is_left_beside_the_rows(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20, after_step=10)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_no_number_still_makes_a_row_of_standard_json(tmp_path: Path, value: float) -> None:
    metrics = Metrics(tmp_path, after_step=0, tensorboard=False)
    metrics.write(10, {"loss": 1.0, "grad_norm": value})  # an fp16 step that the scaler skips has such a norm
    metrics.close()

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON (RFC 8259)")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] == 1.0


def test_tensorboard_gets_each_value_and_forgets_what_is_repeated(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    write(tmp_path, 10, 20, 30, tensorboard=True)
    write(tmp_path, 30, 40, after_step=20, tensorboard=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, round(event.value, 6)) for event in found.Scalars("loss")] == [
        (10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0),
    ]  # fmt: skip
