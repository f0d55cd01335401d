"""Stopping in time with no signal: worked out from how long steps and saves take."""

from __future__ import annotations

import time

import pytest

from train.deadline import Deadline
from train.errors import UsageError
from train.identity import time_is_up_s


def first_due_s(deadline: Deadline, step_s: float, start_s: float = 1000.0, most: int = 100_000) -> float:
    for number in range(most):
        if deadline.is_due(start_s + number * step_s):
            return start_s + number * step_s
    raise AssertionError("never due")


@pytest.mark.parametrize("step_s", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("save_s", [0.0, 10.0])
def test_the_last_steps_and_the_save_end_before_the_time_is_up_but_not_long_before(
    step_s: float, save_s: float
) -> None:
    deadline = Deadline(1300.0, lambda: save_s)
    due_s = first_due_s(deadline, step_s)
    # The step that asks, the step that reads it, a save that had just begun, and the last one.
    done_s = due_s + 2 * step_s + 2 * save_s
    assert done_s <= 1300 - 2.0
    assert done_s >= 1300 - 2.0 - 2 * step_s - 1e-6


def test_a_save_that_turns_out_slower_counts_at_once() -> None:
    save_s = 1.0
    deadline = Deadline(1100.0, lambda: save_s)
    assert not deadline.is_due(1060.0)
    save_s = 30.0
    assert deadline.is_due(1061.0)


def test_one_slow_step_of_long_ago_is_forgotten() -> None:
    deadline = Deadline(2000.0)
    assert not deadline.is_due(1000.0)
    assert not deadline.is_due(1100.0)
    assert deadline.needed_s() == pytest.approx(302)
    for number in range(1, 21):
        deadline.is_due(1100.0 + number)
    assert deadline.needed_s() == pytest.approx(5)


def test_without_a_limit_it_never_comes() -> None:
    assert not Deadline(None).is_due(1e12)


def test_the_earlier_of_agent_and_slurm_counts() -> None:
    now_s = time.monotonic()
    assert time_is_up_s({}) is None
    assert time_is_up_s({"MUSTER_DEADLINE_S": "", "SLURM_JOB_END_TIME": ""}) is None
    assert time_is_up_s({"MUSTER_DEADLINE_S": "1234.5"}) == 1234.5
    slurm = {"SLURM_JOB_END_TIME": str(int(time.time()) + 600)}
    assert time_is_up_s(slurm) == pytest.approx(now_s + 600, abs=3)
    assert time_is_up_s({**slurm, "MUSTER_DEADLINE_S": str(now_s + 60)}) == pytest.approx(now_s + 60)
    assert time_is_up_s({**slurm, "MUSTER_DEADLINE_S": str(now_s + 6000)}) == pytest.approx(now_s + 600, abs=3)


def test_a_limit_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_END_TIME='soon' is no number of seconds"):
        time_is_up_s({"SLURM_JOB_END_TIME": "soon"})
