"""Agent 0's judgement, with time and messages by hand: no process, no socket, no waiting."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.supervised import COLLECTIVE, PORTS, STEP_S, TAKEN, USAGE, Job, code_of, evidence
from train.launch.clock import LOST_AFTER_S
from train.launch.endings import WINDOW_S
from train.launch.supervise import PORT_TRIES
from train.launch.views import Stage
from train.seam import Exit

# The cause.

WORDS = {
    "signal": (Exit.RANK_FAILED, "rank 0 (node0) was killed by signal 9 (SIGKILL)"),
    "host lost": (Exit.HOST_LOST, "host node3 (node rank 3, rank 3) was lost: its cable"),
    "exception": (Exit.RANK_FAILED, "rank 1 (node1) failed: ValueError: bad"),
    "victim": (Exit.RANK_FAILED, f"rank 2 (node2) lost contact with another rank: {COLLECTIVE}"),
}
"""Kinds of failures in the order in which they are taken for the cause."""


def happen(job: Job, what: str) -> None:
    match what:
        case "signal":
            job.rank_ends(0, -9)
        case "exception":
            job.rank_ends(1, 1, "Traceback (most recent call last):", "ValueError: bad")
        case "victim":
            job.rank_ends(2, 1, COLLECTIVE)
        case "host lost":
            job.supervisor.lose(3, "its cable", job.now_s)
            job.silent.add(3)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_cause_is_chosen_by_kind_before_time_in_every_order(count: int) -> None:
    for order in permutations(WORDS, count):
        job = Job(nnodes=4)
        for what in order:
            happen(job, what)
            job.run(STEP_S)
        verdict = job.until_verdict()
        code, words = WORDS[next(what for what in WORDS if what in order)]
        assert (verdict.exit_code, verdict.cause) == (code, words), order
        assert verdict.outcome == "failed"
        assert verdict.start_id == job.supervisor.start_id


def test_of_equals_the_first_is_the_cause() -> None:
    job = Job(nproc=2)
    job.rank_ends(3, -11)
    job.run(STEP_S)
    job.rank_ends(1, -11)
    verdict = job.until_verdict()
    assert (verdict.rank, verdict.node_rank, verdict.host) == (3, 1, "node1")


def test_the_end_comes_a_window_after_the_first_failure() -> None:
    job = Job()
    job.rank_ends(1, 1, "ValueError: bad")
    job.run(WINDOW_S - STEP_S)
    assert job.told("end") == []
    job.run(STEP_S)
    assert [(index, message["now"]) for index, message in job.told("end")] == [(0, False), (1, False)]


def test_a_better_cause_after_the_window_changes_nothing() -> None:
    """What follows later is what the end did to the others."""
    job = Job(nnodes=2, nproc=2)
    job.stubborn = {0, 1}
    job.rank_ends(0, 1, "ValueError: bad")
    job.run(WINDOW_S + STEP_S)
    job.rank_ends(2, -9)
    job.run(STEP_S)
    job.supervisor.lose(1, "its agent died of the end", job.now_s)
    job.stubborn.clear()
    job.hear(0, "ended", left=[])
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.cause) == (5, "rank 0 (node0) failed: ValueError: bad")


def test_after_victims_alone_a_later_culprit_is_the_cause() -> None:
    """Its agent's word came late."""
    job = Job(nnodes=3)
    job.stubborn = {0, 1, 2}
    job.rank_ends(0, 1, COLLECTIVE)
    job.run(WINDOW_S + STEP_S)
    job.rank_ends(2, -9)
    job.stubborn.clear()
    for index in range(3):
        job.hear(index, "ended", left=[])
    assert job.until_verdict().cause == "rank 2 (node2) was killed by signal 9 (SIGKILL)"


def test_victims_and_a_silent_host_wait_for_its_loss() -> None:
    """Its power was cut: the neighbours' sockets close at once, the silence is certain only later."""
    job = Job(nnodes=3)
    job.run(2.0)
    job.silent.add(2)
    cut_s = job.now_s
    job.run(STEP_S)
    job.rank_ends(0, 1, COLLECTIVE)
    job.rank_ends(1, 1, COLLECTIVE)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.host, verdict.node_rank) == (7, "node2", 2)
    assert verdict.cause == (
        "host node2 (node rank 2, rank 2) was lost: "
        "no word from it for 8 s (its network or power was cut, or it is frozen)"
    )
    assert LOST_AFTER_S - 1.0 <= job.now_s - cut_s <= LOST_AFTER_S + 1.0


def test_a_failure_after_the_last_word_of_a_silent_host_is_its_victim() -> None:
    """Also where nobody knows the words of that failure: the host was gone before it."""
    job = Job(nnodes=3)
    job.run(2.0)
    job.silent.add(2)
    job.run(STEP_S)
    job.rank_ends(0, 1, "StrangeError: the other one is gone")
    assert code_of(job) == 7


def test_a_host_that_falls_silent_after_a_failure_is_not_its_cause() -> None:
    job = Job(nnodes=3)
    job.run(2.0)
    job.rank_ends(0, 1, "ValueError: bad")
    job.stubborn.add(2)
    job.run(3.0)
    job.silent.add(2)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.rank) == (5, 0)


def test_victims_alone_with_all_hosts_fresh_are_judged_at_once() -> None:
    job = Job(nnodes=3)
    job.rank_ends(2, 1, COLLECTIVE)
    began_s = job.now_s
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.rank) == (5, 2)
    assert job.now_s - began_s <= WINDOW_S + 3 * STEP_S


def test_a_host_is_lost_after_its_silence_and_the_others_are_ended() -> None:
    job = Job(nnodes=3)
    job.silent.add(1)
    job.run(LOST_AFTER_S - 2 * STEP_S)
    assert job.told("end") == []
    job.run(WINDOW_S + 3 * STEP_S)
    assert [index for index, _ in job.told("end")] == [0, 2]
    assert code_of(job) == 7


def test_a_host_that_is_lost_after_it_has_ended_is_no_failure() -> None:
    job = Job()
    job.stubborn.add(0)
    job.all_end(0)
    job.run(STEP_S)
    job.hear(1, "ended", left=[])
    job.supervisor.lose(1, "it has gone home", job.now_s)
    job.run(STEP_S)
    assert job.supervisor.verdict is None
    job.hear(0, "ended", left=[])
    assert code_of(job) == 0


# Statuses of ranks.


def test_a_refused_config_is_exit_2() -> None:
    job = Job(max_restarts=3)
    job.rank_ends(1, 2, told=USAGE)
    job.rank_ends(0, 1, COLLECTIVE)
    verdict = job.until_verdict()
    assert verdict.exit_code == 2
    assert verdict.cause == "rank 1 (node1) refused to start: train.steps: must be at least 1"


@pytest.mark.parametrize(
    ("refusing", "who"),
    [
        ([3, 0, 2, 1], "ranks 0-3"),
        ([1, 2], "ranks 1, 2"),
        ([0, 2, 3], "ranks 0, 2, 3"),
        ([2], "rank 2 (node1)"),
    ],
)
def test_what_several_ranks_refuse_is_told_of_all_of_them(refusing: list[int], who: str) -> None:
    job = Job(nproc=2)
    for rank in refusing:
        job.rank_ends(rank, 2, "optim.lrr: no such field", told=USAGE)
    verdict = job.until_verdict()
    assert verdict.exit_code == 2
    assert verdict.cause == f"{who} refused to start: train.steps: must be at least 1"
    assert verdict.rank == (2 if refusing == [2] else None)


def test_ranks_that_refuse_for_reasons_of_their_own_are_not_mixed() -> None:
    job = Job()
    job.rank_ends(1, 2, told={**USAGE, "words": "there is no file x"})
    job.rank_ends(0, 2, told=USAGE)
    assert job.until_verdict().cause == "rank 1 (node1) refused to start: there is no file x"


@pytest.mark.parametrize("status", [1, 2, 3, 4, 6, 7, 8, 126, 255])
def test_a_foreign_status_is_a_failed_rank(status: int) -> None:
    job = Job()
    job.rank_ends(1, status)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.cause) == (5, f"rank 1 (node1) failed: it ended with status {status}")


def test_a_foreign_75_that_nobody_asked_for_is_a_failed_rank() -> None:
    """Slurm's scripts would start it again for ever."""
    job = Job()
    job.rank_ends(0, 0)
    job.rank_ends(1, 75)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.cause) == (5, "rank 1 (node1) failed: it ended with status 75")


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((75, 0), 75)])
def test_ranks_that_end_well(codes: tuple[int, int], expected: int) -> None:
    job = Job()
    for rank, code in enumerate(codes):
        job.rank_ends(rank, code, step=7, saved_step=7, is_ours=True)
    verdict = job.until_verdict()
    assert verdict.exit_code == expected
    assert verdict.outcome == ("stopped" if expected else "finished")
    assert verdict.step == 7


def test_the_job_lasts_until_the_last_rank_has_ended() -> None:
    job = Job()
    job.rank_ends(0, 0)
    job.run(30.0)
    assert job.supervisor.stage is Stage.RUNNING
    job.rank_ends(1, 0)
    assert code_of(job) == 0


def test_an_agent_that_cannot_start_its_ranks() -> None:
    job = Job(max_restarts=2)
    job.hear(1, "failed", words="cannot start 'nothing': No such file or directory", exit_code=2)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.host) == (2, "node1")
    assert verdict.cause == "node1 could not start its ranks: cannot start 'nothing': No such file or directory"


# Whatever happens.

CODES = st.sampled_from([0, 75, 1, 2, 3, 7, 137, 255, -6, -9, -11, -15])
LINES = st.sampled_from([(), ("ValueError: bad",), (COLLECTIVE,), *((TAKEN.format(port),) for port in PORTS)])
TOLD = st.sampled_from(
    [None, USAGE, *({"kind": k, "exit_code": c, "words": "w"} for k, c in
                    (("join", 4), ("collective", 5), ("hang", 6), ("interrupted", 8), ("exception", 5)))]
)  # fmt: skip
EVENTS = st.one_of(
    st.tuples(st.just("time"), st.sampled_from([0.2, 1.0, 3.0, 9.0, 40.0])),
    st.tuples(st.just("end"), st.integers(0, 5), CODES, LINES, TOLD),
    st.tuples(st.just("stop"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("lose"), st.integers(1, 2)),
    st.tuples(st.just("silence"), st.integers(1, 2)),
    st.tuples(st.just("stubborn"), st.integers(0, 2)),
    st.tuples(st.just("failed"), st.integers(0, 2), st.sampled_from([2, 5])),
    st.tuples(st.just("evidence"), st.integers(0, 2), st.sampled_from(["S", "T", None])),
    st.tuples(st.just("ended"), st.integers(0, 2)),
    st.tuples(st.just("overdue"), st.integers(0, 2)),
    st.tuples(st.just("join"), st.integers(-1, 3), st.integers(2, 3)),
)


def play(job: Job, event: tuple[Any, ...]) -> None:
    what, *details = event
    if what not in ("time", "end", "join") and job.supervisor.nodes[details[0]].host is None:
        return  # who is not there says nothing
    match what:
        case "time":
            job.run(details[0])
        case "end":
            rank, code, lines, told = details
            if job.supervisor.nodes[rank // 2].host is not None:
                job.rank_ends(rank, code, *lines, told=told)
        case "stop":
            job.stop(node_rank=details[0], now=details[1])
        case "lose":
            job.supervisor.lose(details[0], "gone", job.now_s)
        case "silence":
            job.silent.add(details[0])
        case "stubborn":
            job.stubborn.add(details[0])
        case "failed":
            job.hear(details[0], "failed", words="cannot", exit_code=details[1])
        case "evidence":
            ranks = job.terms.plan.ranks(details[0])
            job.hear(details[0], "evidence", ranks=evidence(*ranks, state=details[1]))
        case "ended":
            job.hear(details[0], "ended", left=[])
        case "overdue":
            first = job.terms.plan.ranks(details[0])[0]
            job.hear(details[0], "beat", ranks=[[first, True, 1, 2, -1, 5.0]], quiet_s=0.0)
        case "join":
            job.join(details[0], nnodes=details[1])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3).flatmap(lambda n: st.lists(EVENTS, min_size=n, max_size=12)),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_whatever_happens_ends_in_one_verdict_that_all_hear(
    events: list[tuple[Any, ...]], here: int, more: int
) -> None:
    job = Job(nnodes=3, nproc=2, joined=False, join_timeout_s=30.0, grace_s=10.0, max_restarts=more)
    job.join(0)  # agent 0 itself
    for index in range(1, here):
        job.join(index)
    job.run(STEP_S)
    for event in events:
        play(job, event)
    for _ in range(more + PORT_TRIES + 2):  # nothing more comes of the ranks: it ends by somebody's stop
        if job.supervisor.verdict is None:
            job.stop()
            job.run_out(60.0)
    verdict = job.supervisor.verdict
    assert verdict is not None
    assert verdict.exit_code in set(Exit) - {Exit.BUG, Exit.PREFLIGHT}
    assert (verdict.outcome == "finished") == (verdict.exit_code == 0)
    assert (verdict.outcome == "stopped") == (verdict.exit_code in (8, 75))
    assert verdict.cause or verdict.exit_code == 0

    first = next(place for place, (_, _, message) in enumerate(job.sent) if message["kind"] == "verdict")
    verdicts = [(index, message) for _, index, message in job.sent[first:]]
    assert {message["kind"] for _, message in verdicts} == {"verdict"}  # nothing comes after it
    reached = [index for index, _ in verdicts]
    assert len(set(reached)) == len(reached)
    present = {index for index, node in enumerate(job.supervisor.nodes) if node.host is not None and not node.is_lost}
    assert present <= set(reached)
    starts = [place for place, (_, _, message) in enumerate(job.sent) if message["kind"] == "start"]
    if starts:
        ended = {index for _, index, message in job.sent[starts[-1] :] if message["kind"] == "end"}
        assert present <= ended
    assert len({message["start_id"] for _, message in job.told("start")}) <= 1 + more + PORT_TRIES

    sent = len(job.sent)
    job.stop(now=True)
    for index in range(3):
        job.hear(index, "ended", left=[])
        job.rank_ends(2 * index, -9)
        job.supervisor.lose(index, "late", job.now_s)
    job.run(10.0)
    assert job.supervisor.verdict is verdict
    assert len(job.sent) == sent


def test_a_rank_that_ends_too_early_is_the_cause_and_not_those_that_miss_it() -> None:
    """An uneven loader, an early return: status 0, and the others lose contact."""
    job = Job()
    job.rank_ends(1, 0)
    job.run(1.0)
    job.rank_ends(0, 1, COLLECTIVE)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.rank) == (5, 1)
    assert verdict.cause is not None
    assert verdict.cause.startswith("rank 1 (node1) came to its end, with status 0, while others still trained")


def test_who_ends_well_after_another_failed_is_not_the_cause() -> None:
    job = Job()
    job.rank_ends(0, 1, COLLECTIVE)
    job.rank_ends(1, 0)
    verdict = job.until_verdict()
    assert (verdict.exit_code, verdict.rank) == (5, 0)
