"""Agent 0's judgement, with time and messages by hand: no process, no socket, no waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.errors import UsageError
from train.launch.clock import LOST_AFTER_S
from train.launch.endings import WINDOW_S
from train.launch.supervise import EVIDENCE_S, PORT_TRIES, Supervisor
from train.launch.topology import Host, Plan
from train.launch.verdict import Verdict
from train.launch.views import Stage, Terms
from train.seam import Exit, Phase

STEP_S = 0.2
COLLECTIVE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"
PORTS = (20000, 20002, 20004, 20006, 20008)


class Job:
    """A supervisor, and agents that do as they are told unless they are silent."""

    def __init__(
        self, nnodes: int = 2, nproc: int = 1, *, joined: bool = True, taken: Sequence[int] = (), **terms: Any
    ) -> None:
        hosts = tuple(Host(f"node{index}", f"10.0.0.{index + 1}", nproc) for index in range(nnodes))
        self.terms = Terms(Plan(hosts, PORTS, (20001,)), ("script",), names_given=True, **terms)
        self.taken = set(taken)
        self.sent: list[tuple[float, int, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.now_s = 100.0
        self.silent: set[int] = set()
        self.stubborn: set[int] = set()
        """Agents that are heard of, but do not do what they are told."""
        self.beaten: dict[int, list[list[Any]]] = {}
        """What each agent's next beats tell, where it is not the usual."""
        self.quiet_s = 0.0
        self._obeyed = 0
        self._beat_s = self.now_s
        self.supervisor = Supervisor(self.terms, self._send, self._record, self._pick, self.now_s)
        if joined:
            for index in range(nnodes):
                assert self.join(index) is None
            self.run(STEP_S)
            assert self.supervisor.stage is Stage.RUNNING

    def _send(self, node_rank: int, message: dict[str, Any]) -> None:
        self.sent.append((self.now_s, node_rank, message))

    def _record(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def _pick(self, ports: Iterable[int]) -> int:
        for port in ports:
            if port not in self.taken:
                return port
        raise UsageError("no port is free")

    # What agents say.

    def join(self, node_rank: int, **greeting: Any) -> str | None:
        usual = {
            "node_rank": node_rank, "nnodes": len(self.terms.plan.hosts), "host": f"node{node_rank}", "agent": "a",
            "version": "1.0", "slots": [host.slots for host in self.terms.plan.hosts],
        }  # fmt: skip
        return self.supervisor.join(node_rank, {**usual, **greeting}, self.now_s)

    def hear(self, node_rank: int, kind: str, **facts: Any) -> None:
        message = {"kind": kind, "start_id": self.supervisor.start_id, **facts}
        self.supervisor.hear(node_rank, message, self.now_s)

    def rank_ends(self, rank: int, code: int, *lines: str, **facts: Any) -> None:
        node_rank = next(i for i in range(len(self.terms.plan.hosts)) if rank in self.terms.plan.ranks(i))
        usual = {"step": None, "saved_step": -1, "oom": False, "told": None, "gpu": None, "by_us": False}
        self.hear(node_rank, "rank_ended", **{**usual, "rank": rank, "code": code, "lines": list(lines), **facts})

    def all_end(self, code: int, **facts: Any) -> None:
        for rank in range(self.terms.plan.world_size):
            self.rank_ends(rank, code, **facts)

    def stop(self, by: str = "Ctrl-C", *, now: bool = False, node_rank: int = 0) -> None:
        self.hear(node_rank, "stop", by=by, now=now)

    # Time.

    def run(self, seconds: float) -> Job:
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = round(self.now_s + STEP_S, 6)
            if self.now_s - self._beat_s >= 1.0 - 1e-9:
                self._beat_s = self.now_s
                for index, node in enumerate(self.supervisor.nodes):
                    if index not in self.silent and node.host is not None and not node.is_lost:
                        self._beat(index)
            self._obey()
            self.supervisor.tick(self.now_s)
        return self

    def _beat(self, index: int) -> None:
        rows = self.beaten.get(index) or [[rank, False, 0, 0, -1, -1.0] for rank in self.terms.plan.ranks(index)]
        self.hear(index, "beat", ranks=rows, quiet_s=self.quiet_s)

    def _obey(self) -> None:
        fresh, self._obeyed = self.sent[self._obeyed :], len(self.sent)
        for _, index, message in fresh:
            if message["kind"] == "end" and index not in self.silent | self.stubborn:
                for rank, view in self.supervisor.nodes[index].ranks.items():
                    if view.code is None:
                        self.rank_ends(rank, -15, by_us=True)
                self.hear(index, "ended", left=[])

    def run_out(self, at_most_s: float) -> None:
        end_s = self.now_s + at_most_s
        while self.supervisor.verdict is None and self.now_s < end_s:
            self.run(STEP_S)

    def until_verdict(self, at_most_s: float = 60.0) -> Verdict:
        self.run_out(at_most_s)
        assert self.supervisor.verdict is not None, f"no verdict after {at_most_s} s"
        return self.supervisor.verdict

    def told(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(index, message) for _, index, message in self.sent if message["kind"] == kind]

    def recorded(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.events if name == event]


def code_of(job: Job) -> int:
    return job.until_verdict().exit_code


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

USAGE = {"kind": "usage", "exit_code": 2, "words": "train.steps: must be at least 1"}


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


# Stopping.


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


# Joining.


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


# Hangs.


def overdue(job: Job, rank: int, phase: Phase = Phase.STEP) -> None:
    job.beaten = {0: [[0, True, 5, int(phase), -1, -1.0]], 1: [[1, True, 5, int(phase), -1, -1.0]]}
    job.beaten[rank] = [[rank, True, 5, int(phase), -1, 0.1]]


def evidence(*ranks: int, **told: Any) -> dict[str, Any]:
    return {str(rank): {"state": "S", "stack": [], "flight": None, **told} for rank in ranks}


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


TAKEN = "RuntimeError: The server socket has failed to listen: port: {}, EADDRINUSE: address already in use"


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
