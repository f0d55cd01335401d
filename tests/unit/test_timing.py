"""Where a rank's time goes: each second of its life is in one activity, and a mark costs next to nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import config_of, make_job
from train import data, health, loop
from train.health import Health
from train.seam import Activity, Phase, StatusPage
from train.timing import Timing

TABLE = ("model.name=mlp", "data.name=classification", "data.size=64", "batch.global_size=8", "train.steps=6")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(health, "_born_s", lambda: now[0] - 3.0)
    return now


def started(path: Path) -> tuple[StatusPage, StatusPage]:
    """The rank's side of a page and the agent's; the rank has told that it is there."""
    agent = StatusPage.make(path)
    rank = StatusPage(path)
    rank.open_as_rank(5.0, health._born_s())
    return rank, agent


def told(page: StatusPage, now_s: float) -> dict[Activity, float]:
    """What is not zero."""
    return {Activity(i): seconds for i, seconds in enumerate(page.times_s(now_s)) if seconds}


def test_a_page_that_no_rank_has_opened_tells_no_times(tmp_path: Path) -> None:
    assert StatusPage.make(tmp_path / "page").times_s(time.monotonic()) == []


def test_every_second_is_in_one_activity_that_which_goes_on_included(clock: list[float], tmp_path: Path) -> None:
    rank, agent = started(tmp_path / "page")
    clock[0] += 2.0
    assert told(agent, clock[0]) == {Activity.LOADING: 5.0}  # three before the page was opened
    for activity, seconds in [(Activity.DATA, 1.5), (Activity.COMPUTING, 4.0), (Activity.DATA, 0.25)]:
        rank.doing(activity)
        clock[0] += seconds
    assert told(agent, clock[0]) == {Activity.LOADING: 5.0, Activity.DATA: 1.75, Activity.COMPUTING: 4.0}
    assert told(agent, clock[0] + 60.0)[Activity.DATA] == 61.75  # it hangs there
    assert sum(agent.times_s(clock[0])) == 3.0 + 2.0 + 1.5 + 4.0 + 0.25


def test_phases_set_the_activity_and_the_first_step_is_one_whole(clock: list[float], tmp_path: Path) -> None:
    agent = StatusPage.make(tmp_path / "page")
    rank = Health(tmp_path / "page")
    rank.start(config_of(*TABLE).runtime)
    timing = Timing(rank, torch.device("cpu"))
    rank.doing(Activity.JOINING)
    clock[0] += 1
    for phase, seconds in [(Phase.FIRST_STEP, 2), (Phase.EVALUATION, 4), (Phase.SAVING, 8), (Phase.ENDING, 16)]:
        rank.enter(phase, 1)
        if phase is Phase.FIRST_STEP:
            timing.doing(Activity.WAITING)
        clock[0] += seconds
    assert told(agent, clock[0]) == {
        Activity.LOADING: 3, Activity.JOINING: 1, Activity.FIRST_STEP: 2, Activity.EVALUATION: 4, Activity.SAVING: 8,
        Activity.ENDING: 16,
    }  # fmt: skip


def test_on_a_gpu_the_host_does_not_guess(clock: list[float], tmp_path: Path) -> None:
    agent = StatusPage.make(tmp_path / "page")
    rank = Health(tmp_path / "page")
    rank.start(config_of(*TABLE).runtime)
    rank.enter(Phase.STEP, 1)
    timing = Timing(rank, torch.device("cuda"))
    for _ in timing.of_data(iter("ab")):
        clock[0] += 1
        timing.doing(Activity.WAITING)
        clock[0] += 2
        timing.doing(Activity.OPTIMIZER)
        clock[0] += 4
    assert told(agent, clock[0]) == {Activity.LOADING: 3, Activity.COMPUTING: 14}


def test_a_real_job_spends_its_time_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(config_of(*TABLE))
    slow_s = {"data": 0.02, "optimizer": 0.04, "evaluation": 0.3}
    windows, step, evaluate = job.batches.windows, job.optimizer.step, data.evaluation_batches

    def late_windows(first: int, stop: int) -> Iterator[Any]:
        for window in windows(first, stop):
            time.sleep(slow_s["data"])
            yield window

    def late_evaluation(*args: Any) -> Iterator[Any]:
        time.sleep(slow_s["evaluation"])
        yield from evaluate(*args)

    def slow_step() -> None:
        time.sleep(slow_s["optimizer"])
        step()

    monkeypatch.setattr(job.batches, "windows", late_windows)
    monkeypatch.setattr(job.optimizer, "step", slow_step)
    monkeypatch.setattr(loop, "evaluation_batches", late_evaluation)
    job.health.start(job.config.runtime)
    began_s = time.monotonic()
    before = job.health.times_s()
    loop.fit(job)
    took_s = time.monotonic() - began_s
    spent = [after - was for after, was in zip(job.health.times_s(), before, strict=True)]
    assert sum(spent) == pytest.approx(took_s, abs=0.05)
    assert 5 * 0.02 <= spent[Activity.DATA] < 5 * 0.02 + 0.08  # the first step is apart
    assert 5 * 0.04 <= spent[Activity.OPTIMIZER] < 5 * 0.04 + 0.08
    assert 0.3 <= spent[Activity.EVALUATION] < 0.5
    assert spent[Activity.FIRST_STEP] >= 0.02 + 0.04


def test_a_process_knows_when_it_was_born() -> None:
    import psutil

    age_s = time.monotonic() - health._born_s()
    assert age_s == pytest.approx(time.time() - psutil.Process(os.getpid()).create_time(), abs=1.0)


def test_the_marks_of_a_step_cost_less_than_fifteen_microseconds() -> None:
    """Those of a step under ddp, a hook in backward included: the best of many tries, and processor time alone, for
    others use this machine.
    """
    job = make_job(config_of(*TABLE, "strategy.name=ddp"))
    job.health.enter(Phase.STEP, 1)
    weight = list(job.objective.parameters())[-1]
    other = weight.detach().clone().requires_grad_()
    timing = Timing(job.health, torch.device("cpu"), job.strategy)

    def plain() -> None:
        for _ in range(20):
            (other * 2.0).sum().backward()

    def marked() -> None:
        for _ in timing.of_data(iter(range(20))):
            (weight * 2.0).sum().backward()
            for activity in (Activity.WAITING, Activity.OPTIMIZER, Activity.WAITING, Activity.OTHER):
                timing.doing(activity)

    def microseconds(steps: Callable[[], None]) -> float:
        began_s = time.thread_time()
        steps()
        return (time.thread_time() - began_s) / 20 * 1e6

    tries = [(microseconds(plain), microseconds(marked)) for _ in range(200)]
    cost = min(with_marks for _, with_marks in tries) - min(without for without, _ in tries)
    print(f"{cost:.1f} µs a step")
    assert 0 < cost < 15
