"""Who comes, who is refused and who is waited for, before a job begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.supervised import PORTS, STEP_S, Job
from train.launch.views import Stage


def test_nothing_starts_before_all_are_there() -> None:
    job = Job(nnodes=3, joined=False)
    job.join(2)
    job.join(0)
    job.run(60.0)
    assert job.told("start") == []
    job.join(1)
    job.run(STEP_S)
    assert [index for index, _ in job.told("start")] == [0, 1, 2]
    (start,) = {str(message) for _, message in job.told("start")}
    assert "'master_port': 20000" in start


def test_who_never_came_is_named() -> None:
    job = Job(nnodes=5, joined=False, join_timeout_s=10.0)
    for index in (0, 2, 4):
        job.join(index)
    job.run(10.0)
    assert job.supervisor.verdict is None
    verdict = job.until_verdict(2 * STEP_S)
    assert (verdict.exit_code, verdict.host, verdict.node_rank) == (4, "node1", 1)
    assert verdict.cause == (
        "host node1 (node rank 1), node3 (node rank 3) of 5 never came within 10 s; here: node0, node2, node4"
    )
    assert [index for index, _ in job.told("verdict")] == [0, 2, 4]


def test_nothing_is_sent_after_the_verdict_not_even_a_beat_that_is_due() -> None:
    job = Job(nnodes=2, joined=False, join_timeout_s=9.9)
    job.join(0)
    job.until_verdict()
    assert job.now_s == 110.0
    assert len(job.told("beat")) == 9
    assert [message["kind"] for _, _, message in job.sent][-1] == "verdict"


def test_many_who_never_came_are_counted() -> None:
    job = Job(nnodes=100, joined=False, join_timeout_s=1.0)
    job.join(0)
    verdict = job.until_verdict()
    assert "node8 (node rank 8) and 91 more of 100 never came" in str(verdict.cause)


@pytest.mark.parametrize("node_rank", [-1, 2, 10**30])
def test_a_stranger_node_rank_is_refused_and_nothing_else_happens(node_rank: int) -> None:
    job = Job(nnodes=2, joined=False)
    words = job.join(node_rank)
    assert words == f"its node rank is {node_rank}, but there are 2 hosts: 0 to 1"
    job.join(0)
    job.join(1)
    assert job.run(STEP_S).supervisor.stage is Stage.RUNNING


def test_an_agent_whose_first_call_failed_halfway_may_call_again() -> None:
    """It gave up waiting for the answer; that its first connection is gone is not known here yet."""
    job = Job(nnodes=2, joined=False)
    assert job.join(1) is None
    assert job.join(1) is None
    job.join(0)
    assert job.run(STEP_S).supervisor.stage is Stage.RUNNING
    assert [index for index, _ in job.told("start")] == [0, 1]


def test_a_node_rank_that_is_taken_is_refused() -> None:
    job = Job(nnodes=2, joined=False)
    job.join(1)
    words = job.join(1, host="another", agent="b")
    assert words == "node rank 1 has been taken by node1: give each host a node rank of its own"
    job.join(0)
    assert job.run(STEP_S).supervisor.stage is Stage.RUNNING


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ({"nnodes": 3}, "--nnodes is 3 on node1, but 2 on node0"),
        ({"slots": [1, 8]}, "--nproc-per-node is [1, 8] on node1, but [1, 1] on node0"),
        ({"slots": None}, "--nproc-per-node is None on node1, but [1, 1] on node0"),
        ({"version": "0.9"}, "--version is 0.9 on node1, but 1.0 on node0"),
    ],
)
def test_a_host_with_other_counts_ends_the_job_before_it_starts(greeting: dict[str, Any], words: str) -> None:
    job = Job(nnodes=2, joined=False)
    job.join(0)
    assert job.join(1, **greeting) == words
    verdict = job.until_verdict(STEP_S)
    assert (verdict.exit_code, verdict.cause, verdict.host) == (2, words, "node1")
    assert job.told("start") == []


def test_an_agent_that_leaves_while_others_are_waited_for_may_come_back() -> None:
    job = Job(nnodes=3, joined=False)
    job.join(0)
    job.join(1)
    job.supervisor.lose(1, "the connection ended", job.now_s)
    job.join(2)
    job.run(20.0)
    assert job.told("start") == []
    assert job.join(1, host="node1") is None
    assert job.run(STEP_S).supervisor.stage is Stage.RUNNING


def test_nobody_joins_a_job_that_has_begun() -> None:
    job = Job(nnodes=2)
    assert "has begun without this agent" in str(job.join(1))
    job.supervisor.lose(1, "gone", job.now_s)
    assert "has begun without this agent" in str(job.join(1))


def test_no_free_port_ends_the_job_everywhere() -> None:
    job = Job(joined=False, taken=PORTS)
    job.join(0)
    job.join(1)
    verdict = job.until_verdict(2 * STEP_S)
    assert (verdict.exit_code, verdict.cause) == (2, "no port is free")
    assert [index for index, _ in job.told("verdict")] == [0, 1]
    assert job.told("start") == []
