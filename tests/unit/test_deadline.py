"""Stopping in time with no signal: worked out from how long steps and saves take."""

from __future__ import annotations

import time

import pytest

from train.deadline import EVALUATION, Deadline
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


class Run:
    """A run of which each part takes a known time; it stops as the loop does: a request is read one step later."""

    def __init__(self, limit_s: float, step_s: float, evaluation_s: float, every: int, save_s: float = 1.0) -> None:
        self.now_s, self.step_s, self.evaluation_s, self.every, self.save_s = 0.0, step_s, evaluation_s, every, save_s
        self.step = 0
        self.evaluations = 0
        self.deadline = Deadline(limit_s, lambda: save_s, clock=lambda: self.now_s)
        self.deadline.evaluates_next = lambda: (self.step + 1) % every == 0

    def ended_s(self) -> float:
        """When the last save is on the disk."""
        was_asked = False
        while True:
            asked = self.deadline.is_due(self.now_s)
            self.now_s += self.step_s
            self.step += 1
            evaluates = self.step % self.every == 0
            if was_asked or (evaluates and asked):
                return self.now_s + self.save_s
            was_asked = asked
            if evaluates:
                with self.deadline.aside(EVALUATION):
                    self.now_s += self.evaluation_s
                self.evaluations += 1


@pytest.mark.parametrize("limit_s", range(400, 1400, 7))
def test_no_evaluation_is_begun_that_would_not_end_in_time_however_long_ago_the_last_one_was(limit_s: int) -> None:
    run = Run(limit_s, step_s=1.0, evaluation_s=150.0, every=100)
    assert limit_s - 1 >= run.ended_s() + 1.0
    # Neither is one left out, nor a step, that would have had the time.
    whole, rest_s = divmod(limit_s, 250.0)
    assert run.evaluations == whole + (rest_s > 100 + 150 - 1) - (rest_s < 6 and whole > 0)
    assert run.now_s >= limit_s - 9 or run.step % 100 == 0


def test_an_evaluation_does_not_count_as_a_step_that_is_to_come_again() -> None:
    run = Run(10_000, step_s=1.0, evaluation_s=600.0, every=10)
    for _ in range(2):
        run.deadline.is_due(run.now_s)
        run.now_s += 1.0
    with run.deadline.aside(EVALUATION):
        run.now_s += 600.0
    run.deadline.is_due(run.now_s)
    assert run.deadline.needed_s() == pytest.approx(3 * 1.0 + 2 * 1.0 + 2.0)


def test_before_the_first_evaluation_its_time_is_guessed_from_its_size() -> None:
    run = Run(10_000, step_s=2.0, evaluation_s=1.0, every=2)
    run.deadline.steps_an_evaluation = 50.0
    run.deadline.is_due(0.0)
    run.deadline.is_due(2.0)
    usual_s = run.deadline.needed_s()
    run.step = 1
    assert run.deadline.needed_s() == usual_s + 100.0


def test_a_save_that_must_wait_for_the_one_before_is_reckoned_with() -> None:
    deadline = Deadline(1000.0, lambda: 10.0)
    usual_s = deadline.needed_s()
    deadline.waits_to_save_next = lambda: True
    assert deadline.needed_s() == usual_s + 10.0


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
