"""Speed counts items and time of steps, and nothing in between; a loss that is no number ends the run in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from tests.jobs import config_of, make_job
from train import loop, state
from train.errors import NonFiniteError
from train.meter import Meter, Step
from train.metrics import Metrics
from train.state import Evaluation, Job
from train.tally import Tally, Totals

TABLE = ("model.name=mlp", "data.name=classification", "data.size=100", "batch.global_size=8", "train.seed=3")


@dataclass
class Clock:
    """Time that passes only where a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rows:
    """In place of the files: what was written, by step."""

    written: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def write(self, step: int, values: dict[str, float]) -> None:
        self.written.append((step, values))

    def speeds(self) -> dict[int, float]:
        return {step: row["items_per_s"] for step, row in self.written if "items_per_s" in row}


@dataclass
class Told:
    """In place of a Tally: totals that are there already."""

    step: int
    totals: Totals
    local_loss_sum: torch.Tensor

    def read(self) -> Totals:
        return self.totals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("train.meter.time.perf_counter", clock)
    return clock


def job_with(rows: Rows, *flags: str) -> Job:
    job = make_job(config_of(*TABLE, *flags))
    job.metrics = cast(Metrics, rows)
    return job


def step_of(number: int, items: float = 8.0, loss_sum: float = 16.0, stops: float = 0.0) -> Step:
    told = Told(number, Totals(loss_sum, items, stops), torch.tensor(loss_sum))
    return Step(cast(Tally, told), lr=0.5, norm=torch.tensor(3.0))


def test_a_row_holds_the_speed_since_the_row_before(clock: Clock) -> None:
    job = job_with(rows := Rows(), "train.steps=5", "train.log_every=2")
    measuring = Meter(job)
    for number, (items, seconds) in enumerate([(10, 2.0), (30, 3.0), (5, 0.5), (5, 0.5), (9, 1.0)], 1):
        clock.now += seconds
        measuring.note(step_of(number, items))
    assert rows.speeds() == {2: 40 / 5, 4: 10 / 1, 5: 9 / 1}  # every second step, and the last
    assert (job.progress.items, job.progress.seconds) == (59, 7)


def test_a_row_holds_what_the_step_told(clock: Clock) -> None:
    job = job_with(rows := Rows(), "train.steps=5", "train.log_every=1")
    measuring = Meter(job)
    clock.now += 1
    assert not measuring.note(step_of(1, items=8.0, loss_sum=4.0))
    assert measuring.note(step_of(2, stops=1.0))
    row = dict(rows.written)[1]
    assert (row["loss"], row["lr"], row["grad_norm"]) == (0.5, 0.5, 3.0)


def test_the_time_of_an_evaluation_between_two_rows_does_not_count_but_the_steps_before_it_do(clock: Clock) -> None:
    job = job_with(rows := Rows(), "train.steps=8", "train.log_every=4")
    measuring = Meter(job)
    for number in range(1, 9):
        clock.now += number
        measuring.note(step_of(number, items=number**2))
        if number in (2, 4, 7):
            clock.now += 1000
            measuring.note_evaluation(Evaluation(1.0, None, 8))
            measuring.restart()
    assert rows.speeds() == {4: 30 / 10, 8: 174 / 26}
    assert (job.progress.items, job.progress.seconds) == (204, 36)


def fit_by(clock: Clock, patch: pytest.MonkeyPatch, log_every: int) -> tuple[Job, Rows]:
    """A run of eleven steps of a second each, with evaluations and saves on the way that take hours."""

    def takes(seconds: float, then: Callable[..., Evaluation | None]) -> Callable[..., Evaluation | None]:
        def timed(job: Job, **more: bool) -> Evaluation | None:
            clock.now += seconds
            return then(job, **more)

        return timed

    patch.setattr(loop, "evaluate", takes(3600.0, loop.evaluate))
    patch.setattr(loop, "save", takes(7200.0, state.save))
    flags = ("train.steps=11", f"train.log_every={log_every}", "train.eval_every=4", "train.save_every=5")
    job = job_with(rows := Rows(), *flags)
    real = job.precision.step

    def step(optimizer: torch.optim.Optimizer) -> bool:
        clock.now += 1.0
        return real(optimizer)

    job.precision.step = step  # type: ignore[method-assign]
    began = clock.now
    assert loop.fit(job)
    assert clock.now - began == 11 + 3 * 3600 + 3 * 7200  # after 4, 8, 11 and after 5, 10, 11
    return job, rows


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_over_a_whole_run_items_over_seconds_are_the_speed_of_steps_alone(
    log_every: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the loop, which notes a step while the next one runs."""
    job, rows = fit_by(clock, monkeypatch, log_every)
    assert (job.progress.items, job.progress.seconds) == (11 * 8, 11)
    assert max(rows.speeds()) == 11
    if log_every == 100:
        assert rows.speeds() == {11: 8.0}


def test_steps_of_equal_time_have_rows_of_equal_speed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = fit_by(clock, monkeypatch, log_every=1)
    assert rows.speeds() == dict.fromkeys(range(1, 12), 8.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_names_rank_step_and_samples(bad: float) -> None:
    job = job_with(rows := Rows(), "train.steps=5", "train.log_every=1")
    measuring = Meter(job)
    measuring.note(step_of(1))
    with pytest.raises(NonFiniteError) as caught:
        measuring.note(step_of(2, loss_sum=bad))
    samples = ", ".join(str(place) for place in job.order.batch(1).tolist())
    assert f"the loss is {bad} at step 2 on rank 0 ({job.runtime.host}), samples {samples} of" in str(caught.value)
    assert [step for step, _ in rows.written] == [1]  # no row of it
    assert job.progress.items == 8


def test_a_sum_over_ranks_can_be_infinite_where_this_ranks_share_is_not() -> None:
    measuring = Meter(job_with(Rows(), "train.steps=5"))
    told = Told(1, Totals(math.inf, 8.0, 0.0), torch.tensor(3.0))
    with pytest.raises(NonFiniteError, match="the loss is inf at step 1 on the sum over ranks"):
        measuring.note(Step(cast(Tally, told), lr=0.5, norm=None))
