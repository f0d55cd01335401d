"""Hangs and restarts, as agent 0 sees them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.supervised import PORTS, STEP_S, TAKEN, USAGE, Job, code_of, evidence
from train.launch.supervise import EVIDENCE_S, PORT_TRIES
from train.seam import Phase

# Hangs.


def overdue(job: Job, rank: int, phase: Phase = Phase.STEP) -> None:
    job.beaten = {0: [[0, True, 5, int(phase), -1, -1.0]], 1: [[1, True, 5, int(phase), -1, -1.0]]}
    job.beaten[rank] = [[rank, True, 5, int(phase), -1, 0.1]]


def test_a_rank_that_is_overdue_leads_to_evidence_and_then_to_exit_6() -> None:
    job = Job()
    overdue(job, 1)
    job.run(1.0)
    assert [index for index, _ in job.told("evidence")] == [0, 1]
    job.run(1.0)
    assert len(job.told("evidence")) == 2  # asked once
    job.hear(0, "evidence", ranks=evidence(0))
    job.run(STEP_S)
    assert job.told("end") == []
    job.hear(1, "evidence", ranks=evidence(1, state="T"))
    verdict = job.until_verdict(2.0)
    assert (verdict.exit_code, verdict.rank, verdict.host, verdict.step) == (6, 1, "node1", 5)
    assert verdict.cause == (
        "hang: rank 1 (node1) is stopped (SIGSTOP, Ctrl-Z or a debugger) (rank 1 made no progress in time (step))"
    )
    assert "debugger" in str(verdict.advice)
    assert "timeout" not in str(verdict.advice)


@pytest.mark.parametrize("is_ours", [True, False])
def test_more_time_is_advised_by_the_option_that_there_is(is_ours: bool) -> None:
    job = Job(idle_timeout_s=60.0)
    for rank in (0, 1):
        job.beaten[rank] = [[rank, is_ours, 5, int(Phase.STEP), -1, -1.0]]
    job.quiet_s = 60.1
    job.run(1.0)
    for rank in (0, 1):
        job.hear(rank, "evidence", ranks=evidence(rank))
    advice = str(job.until_verdict().advice)
    assert "--idle-timeout-s" in advice
    assert ("--runtime.step_timeout_s" in advice) == is_ours


def test_ranks_that_die_of_being_asked_do_not_change_the_hang() -> None:
    job = Job()
    overdue(job, 1)
    job.run(1.0)
    for rank in (0, 1):
        job.rank_ends(rank, -6, "Fatal Python error: Aborted", by_us=True)
        job.hear(rank, "evidence", ranks=evidence(rank))
    assert code_of(job) == 6


def test_a_host_that_gives_no_evidence_is_waited_for_so_long_and_not_longer() -> None:
    job = Job()
    overdue(job, 0)
    job.run(1.0)
    job.hear(0, "evidence", ranks=evidence(0))
    job.run(EVIDENCE_S - STEP_S)
    assert job.told("end") == []
    job.run(2 * STEP_S)
    assert len(job.told("end")) == 2
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.rank, verdict.host) == (6, 1, "node1")
    assert "its host node1 does not answer" in str(verdict.cause)


def test_silence_of_all_ranks_is_a_hang_where_an_idle_time_is_given() -> None:
    job = Job(idle_timeout_s=60.0)
    job.quiet_s = 60.0
    job.run(5.0)
    assert job.told("evidence") == []
    job.quiet_s = 60.1
    job.run(1.0)
    assert len(job.told("evidence")) == 2
    assert job.recorded("hang") == [{"why": "no rank said anything for 60 s"}]
    assert job.until_verdict().exit_code == 6


def test_without_an_idle_time_silence_is_no_hang() -> None:
    job = Job()
    job.quiet_s = 1e6
    job.run(100.0)
    assert job.told("evidence") == []


def test_one_rank_that_says_something_is_no_hang() -> None:
    job = Job(idle_timeout_s=60.0)
    job.run(1.0)
    for _ in range(5):
        job.hear(0, "beat", ranks=[], quiet_s=100.0)
        job.hear(1, "beat", ranks=[], quiet_s=1.0)
        job.supervisor.tick(job.now_s)
    assert job.told("evidence") == []


def test_a_rank_that_has_ended_is_not_overdue() -> None:
    job = Job()
    job.rank_ends(1, 0)
    overdue(job, 1)
    job.run(5.0)
    assert job.told("evidence") == []


def test_after_a_failure_no_hang_is_looked_for() -> None:
    job = Job()
    job.rank_ends(0, 1, "ValueError: bad")
    overdue(job, 1)
    verdict = job.until_verdict()
    assert (verdict.exit_code, job.told("evidence")) == (5, [])


# Restarts.


def fail_once(job: Job, **facts: Any) -> None:
    """The start that runs fails; all is well until the next one runs, or the verdict is there."""
    starts = len(job.told("start"))
    job.rank_ends(1, 1, "ValueError: bad", **facts)
    for _ in range(100):
        job.run(STEP_S)
        if job.supervisor.verdict is not None or len(job.told("start")) > starts:
            return
    raise AssertionError("neither a restart nor a verdict")


def test_a_job_is_restarted_so_often_each_time_with_a_new_id_and_port() -> None:
    job = Job(max_restarts=2)
    for _ in range(3):
        assert job.supervisor.verdict is None
        fail_once(job)
    assert job.until_verdict().exit_code == 5
    starts = [message for index, message in job.told("start") if index == 1]
    assert [message["restart_count"] for message in starts] == [0, 1, 2]
    assert [message["master_port"] for message in starts] == [20000, 20002, 20004]
    assert len({message["start_id"] for message in starts}) == 3
    assert [row["number"] for row in job.recorded("restart")] == [1, 2]
    assert job.until_verdict().start_id == starts[-1]["start_id"]


def test_a_restarted_job_can_finish() -> None:
    job = Job(max_restarts=1)
    fail_once(job)
    job.all_end(0)
    assert code_of(job) == 0


def test_a_hang_is_restarted_and_does_not_hang_again_by_its_own_past() -> None:
    """Beats that were under way tell of ranks that are gone."""
    job = Job(max_restarts=1, idle_timeout_s=60.0)
    job.quiet_s = 61.0
    job.run(1.0)
    old = job.supervisor.start_id
    for index in range(2):
        job.hear(index, "evidence", ranks=evidence(index))
    job.quiet_s = 0.0
    while len(job.told("start")) < 4:
        job.run(STEP_S)
    late = [[1, True, 5, int(Phase.STEP), -1, 99.0]]
    job.supervisor.hear(1, {"kind": "beat", "start_id": old, "ranks": late, "quiet_s": 99.0}, job.now_s)
    job.supervisor.hear(
        1,
        {"kind": "rank_ended", "start_id": old, "rank": 1, "code": -9, "step": None, "saved_step": -1, "oom": False,
         "told": None, "gpu": None, "by_us": False, "lines": []},
        job.now_s,
    )  # fmt: skip
    job.supervisor.hear(1, {"kind": "ended", "start_id": old, "left": []}, job.now_s)
    job.run(10.0)
    assert job.supervisor.verdict is None
    assert len(job.told("evidence")) == 2
    job.all_end(0)
    assert code_of(job) == 0


@pytest.mark.parametrize("what", ["usage", "saved", "host lost", "rank and host", "unsaved"])
def test_what_is_not_restarted(what: str) -> None:
    job = Job(max_restarts=5)
    match what:
        case "usage":
            job.rank_ends(1, 2, told=USAGE)
        case "saved":
            job.stop()
            job.all_end(75)
        case "host lost":
            job.supervisor.lose(1, "gone", job.now_s)
            job.silent.add(1)
        case "rank and host":  # the cause could be tried again, but not without that host
            job.rank_ends(0, -9)
            job.supervisor.lose(1, "gone", job.now_s)
            job.silent.add(1)
        case "unsaved":
            job.stop()
            job.run(1.0)
            job.stop(now=True)
    expected = {"usage": 2, "saved": 75, "host lost": 7, "rank and host": 5, "unsaved": 8}[what]
    assert code_of(job) == expected
    assert len({message["start_id"] for _, message in job.told("start")}) == 1


def test_a_port_that_was_taken_meanwhile_is_changed_and_is_no_restart() -> None:
    job = Job()
    for port in PORTS[:PORT_TRIES]:
        job.rank_ends(0, 1, TAKEN.format(port))
        starts = len(job.told("start"))
        while len(job.told("start")) == starts and job.supervisor.verdict is None:
            job.run(STEP_S)
        assert job.supervisor.verdict is None
    assert [m["master_port"] for i, m in job.told("start") if i == 0] == list(PORTS[: PORT_TRIES + 1])
    assert {m["restart_count"] for _, m in job.told("start")} == {0}
    job.rank_ends(0, 1, TAKEN.format(PORTS[PORT_TRIES]))
    assert job.until_verdict().exit_code == 5  # not for ever


def test_a_port_of_another_rank_or_later_is_its_own_affair() -> None:
    for rank, step, port in ((1, None, PORTS[0]), (0, 5, PORTS[0]), (0, None, 9999)):
        job = Job()
        job.rank_ends(rank, 1, TAKEN.format(port), step=step)
        assert code_of(job) == 5
        assert len(job.told("start")) == 2
