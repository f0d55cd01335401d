"""A supervisor with time and messages by hand, and agents that do as they are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from train.errors import UsageError
from train.launch.supervise import Supervisor
from train.launch.topology import Host, Plan
from train.launch.verdict import Verdict
from train.launch.views import Stage, Terms

STEP_S = 0.2
COLLECTIVE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"
PORTS = (20000, 20002, 20004, 20006, 20008)
USAGE = {"kind": "usage", "exit_code": 2, "words": "train.steps: must be at least 1"}
TAKEN = "RuntimeError: The server socket has failed to listen: port: {}, EADDRINUSE: address already in use"


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


def evidence(*ranks: int, **told: Any) -> dict[str, Any]:
    return {str(rank): {"state": "S", "stack": [], "flight": None, **told} for rank in ranks}
