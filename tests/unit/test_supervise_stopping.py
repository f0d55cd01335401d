"""Stop requests, time limits and graces, as agent 0 sees them."""

from __future__ import annotations

import pytest

from tests.supervised import COLLECTIVE, STEP_S, Job, code_of
from train.seam import Phase


def test_a_stop_goes_to_all_and_ranks_that_save_end_well() -> None:
    job = Job()
    job.stop("SIGUSR2", node_rank=1)
    assert [(i, m["by"]) for i, m in job.told("stop")] == [(0, "SIGUSR2 at node1"), (1, "SIGUSR2 at node1")]
    job.all_end(75, step=12, saved_step=12)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.outcome) == (75, "stopped")
    assert verdict.cause == "stopped by SIGUSR2 at node1 at step 12, saved: the same command goes on from there"


def test_our_ranks_that_finish_before_they_see_the_stop_have_finished() -> None:
    job = Job()
    job.beaten = {i: [[i, True, 9, int(Phase.ENDING), 9, -1.0]] for i in range(2)}
    job.run(1.0)
    job.stop()
    job.all_end(0, step=10)
    assert code_of(job) == 0


def test_a_foreign_script_that_ends_itself_well_on_the_signal_has_stopped() -> None:
    job = Job()
    job.stop()
    job.all_end(0)
    assert code_of(job) == 75


@pytest.mark.parametrize("number", [1, 2, 10, 12, 15])
def test_a_foreign_script_that_dies_of_the_stop_has_saved_nothing(number: int) -> None:
    job = Job()
    job.stop()
    job.all_end(-number)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.outcome) == (8, "stopped")
    assert "with nothing saved" in str(verdict.cause)


def test_a_signal_that_nobody_asked_for_is_a_failure() -> None:
    job = Job()
    job.rank_ends(1, -15)
    assert code_of(job) == 5


def test_victims_of_a_rank_that_the_stop_ended_do_not_make_it_a_failure() -> None:
    """Rank 0 dies of the stop; rank 1, which would have saved, sees a closed socket first."""
    job = Job()
    job.stop()
    job.rank_ends(0, -15)
    job.rank_ends(1, 1, COLLECTIVE)
    assert code_of(job) == 8


def test_a_failure_after_a_stop_is_a_failure() -> None:
    job = Job(max_restarts=3)
    job.stop()
    job.run(1.0)
    job.rank_ends(1, 1, "ValueError: while saving")
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.cause) == (5, "rank 1 (node1) failed: ValueError: while saving")
    assert len(job.told("start")) == 2  # one each, no restart


def test_a_second_stop_ends_at_once_unsaved() -> None:
    job = Job(nproc=2)
    job.beaten = {0: [[0, True, 30, 2, 20, -1.0], [1, True, 30, 2, 20, -1.0]]}
    job.run(1.0)
    job.stop()
    job.run(1.0)
    job.stop(now=True)
    assert [(index, message["now"]) for index, message in job.told("end")] == [(0, True), (1, True)]
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.outcome) == (8, "stopped")
    assert verdict.cause == "stopped at once by Ctrl-C at node0; the last checkpoint is of step 20"


def test_a_second_stop_of_a_job_that_had_saved_is_a_good_stop() -> None:
    job = Job()
    job.stop()
    job.all_end(75, step=3, saved_step=3)
    job.stop(now=True)
    assert code_of(job) == 75


def test_the_end_of_the_grace_ends_unsaved() -> None:
    job = Job(grace_s=30.0)
    job.stop()
    job.run(30.0)
    assert job.told("end") == []
    job.run(2 * STEP_S)
    assert [message["now"] for _, message in job.told("end")] == [True, True]
    verdict = job.until_verdict()
    assert verdict.exit_code == 8
    assert verdict.cause == "stopped by Ctrl-C at node0, but not done within the grace of 30 s"


def test_a_first_stop_that_says_now_is_still_the_first() -> None:
    """A second Ctrl-C at an agent whose first one never came here."""
    job = Job()
    job.stop(now=True)
    assert job.told("end") == []
    assert len(job.told("stop")) == 2


@pytest.mark.parametrize("wait_s", [0.0, 0.4, 1.2])
def test_stops_after_a_failure_do_not_change_its_verdict(wait_s: float) -> None:
    """Within the window, and while all are being ended."""
    job = Job()
    job.stubborn = {0, 1}
    job.rank_ends(1, -9)
    job.run(wait_s)
    job.stop()
    job.stop(now=True)
    job.stubborn.clear()
    job.run(STEP_S)
    for index in range(2):
        job.hear(index, "ended", left=[])
    assert code_of(job) == 5


def test_a_stop_while_waiting_for_hosts() -> None:
    job = Job(nnodes=3, joined=False)
    job.join(0)
    job.join(1)
    job.stop("SIGTERM", node_rank=1)
    verdict = job.until_verdict(STEP_S)
    assert (verdict.exit_code, verdict.cause) == (8, "stopped by SIGTERM at node1 before it began")
    assert [index for index, _ in job.told("verdict")] == [0, 1]


def test_the_time_limit_asks_for_a_stop_so_that_the_grace_fits_in() -> None:
    job = Job(time_limit_s=100.0, grace_s=30.0)
    job.run(70.0 - STEP_S)
    assert job.told("stop") == []
    job.run(2 * STEP_S)
    assert [(index, message["by"]) for index, message in job.told("stop")] == [
        (0, "the time limit of 100 s"),
        (1, "the time limit of 100 s"),
    ]
    assert job.until_verdict(40.0).exit_code == 8
    assert job.now_s - 100.0 <= 100.0 + 2.0  # by its own clock, which began at 100


def test_a_grace_longer_than_the_limit_leaves_half_of_it_to_train() -> None:
    job = Job(time_limit_s=100.0, grace_s=300.0)
    job.run(50.0 - STEP_S)
    assert job.told("stop") == []
    job.run(2 * STEP_S)
    assert len(job.told("stop")) == 2
