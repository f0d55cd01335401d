"""Agent 0's judgement: who is here, who got on, who failed, when all must end, and what the cause was.

Pure: it is told the time and what was heard, and says what to send. So every order of events can be tried in a test.

Messages from an agent: `beat` (each rank's step and phase), `rank_ended`, `stop` (somebody asks), `failed` (nothing
could be started), `evidence` (of a hang), `ended` (nobody is left on its host). To an agent: `start`, `beat`, `stop`,
`evidence` (please), `end`, `verdict`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence

from train.errors import UsageError
from train.launch import endings
from train.launch.clock import LOST_AFTER_S
from train.launch.verdict import Failure, Kind, Verdict, cause_of, failure_of_rank, verdict_of
from train.launch.views import NodeView, RankView, Stage, Terms
from train.launch.wire import Message
from train.seam import Exit, Phase

BEAT_S = 1.0
EVIDENCE_S = 5.0
ENDING_S = 15.0
"""So long for all to end; longer than `LOST_AFTER_S`, so that who is silent meanwhile may turn out to be the cause."""
PORT_TRIES = 3
_SPELLED = {"version": "version", "nnodes": "nnodes", "slots": "nproc-per-node"}


class Supervisor:
    """One job, through all its starts."""

    def __init__(
        self,
        terms: Terms,
        send: Callable[[int, Message], None],
        record: Callable[..., None],
        pick_port: Callable[[Iterable[int]], int],
        now_s: float,
    ) -> None:
        """
        Args:
            terms: what to run, where, and how long to wait.
            send: queues a message to the agent of a node rank.
            record: writes an event: its name, and facts by keyword.
            pick_port: the first of these ports that is free on this host.
            now_s: the clock; it may stand still while this process does.
        """
        self.terms, self._send, self._record, self._pick_port = terms, send, record, pick_port
        self.nodes = [NodeView(host.name) for host in terms.plan.hosts]
        self.stage = Stage.JOINING
        self.verdict: Verdict | None = None
        self.start_id = ""
        self.restarts = 0
        self._own: Message = {}
        self.strangers: dict[str, None] = {}
        """Addresses that called with another secret."""
        self._now_s = self._began_s = now_s
        self._beat_s = now_s
        self._ports_tried: list[int] = []
        self._ports_lost = 0
        self._stop_by: str | None = None
        self._stop_s = 0.0
        self._cut_short: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._failures: list[Failure] = []
        self._end_at_s: float | None = None
        self._evidence_at_s: float | None = None
        for index, node in enumerate(self.nodes):
            node.has_ended = False
            node.evidence = None
            node.quiet_s = 0.0
            node.ranks = {rank: RankView() for rank in self.terms.plan.ranks(index)}

    # What happens.

    def join(self, node_rank: int, greeting: Message, now_s: float) -> str | None:
        """An agent proved that it knows the secret; why it cannot take part, if it cannot."""
        self._now_s = now_s
        nnodes = len(self.nodes)
        if self.stage is not Stage.JOINING:
            return f"the job has begun without this agent, or has had an agent of node rank {node_rank} before"
        if not 0 <= node_rank < nnodes:
            return f"its node rank is {node_rank}, but there are {nnodes} hosts: 0 to {nnodes - 1}"
        node = self.nodes[node_rank]
        is_taken = node.host is not None and now_s - node.heard_s <= LOST_AFTER_S  # else it is gone: another may come
        if is_taken and node.agent != greeting.get("agent"):  # the same one may call again
            return f"node rank {node_rank} has been taken by {node.host}: give each host a node rank of its own"
        self._own = self._own or greeting
        for what in ("version", "nnodes", "slots"):
            mine = self._own.get(what)
            if greeting.get(what) != mine:
                host, advice = str(greeting.get("host")), "start all agents with the same"
                words = f"--{_SPELLED[what]} is {greeting.get(what)} on {host}, but {mine} on {self.name(0)}"
                self._fail(Failure(Kind.NEVER_JOINED, now_s, words, Exit.USAGE, host, node_rank, advice=advice))
                return words
        node.host, node.agent = str(greeting.get("host")), greeting.get("agent")
        node.heard_s = now_s
        self._record("joined", node_rank=node_rank, host=node.host)
        return None

    def hear(self, node_rank: int, message: Message, now_s: float) -> None:
        """A message of an agent."""
        self._now_s = now_s
        node = self.nodes[node_rank]
        node.heard_s = now_s
        kind = message.get("kind")
        if kind != "stop" and message.get("start_id", self.start_id) != self.start_id:
            return  # it was under way when the start it tells of was over
        match kind:
            case "beat":
                self._note_beat(node, message)
            case "rank_ended":
                self._note_end(node_rank, message)
            case "stop":
                at = "" if message.get("from_afar") else f" at {self.name(node_rank)}"
                self.stop(f"{message['by']}{at}", now_s, now=bool(message["now"]))
            case "failed":
                name, code = self.name(node_rank), Exit(message["exit_code"])
                words = f"{name} could not start its ranks: {message['words']}"
                self._fail(Failure(Kind.EXCEPTION, now_s, words, code, name, node_rank))
                for rank in node.ranks.values():
                    rank.code = 0 if rank.code is None else rank.code
            case "evidence":
                node.evidence = (node.evidence or {}) | {int(rank): told for rank, told in message["ranks"].items()}
            case "ended":
                node.has_ended = True

    def lose(self, node_rank: int, why: str, now_s: float, *, since_s: float | None = None) -> None:
        """A host is gone, or cut off: now, or since it was heard of last."""
        self._now_s = now_s
        node = self.nodes[node_rank]
        if node.is_lost or self.stage is Stage.DONE:
            return
        if self.stage is Stage.JOINING:  # it may come again
            node.host = None
            self._record("left", node_rank=node_rank, why=why)
            return
        node.is_lost = True
        self._record("host lost", node_rank=node_rank, host=self.name(node_rank), why=why)
        if node.has_ended:
            return
        at_s = now_s if since_s is None else since_s
        ranks = self.terms.plan.ranks(node_rank)
        self._fail(endings.host_lost(self.name(node_rank), node_rank, ranks, node.step, why, at_s))

    def sleep(self, why: str, now_s: float) -> None:
        """This very host did not run for so long that the others have given it up: whatever they did since follows."""
        if self.stage is Stage.RUNNING and len(self.nodes) > 1:
            self._now_s = now_s
            words = f"host {self.name(0)} (node rank 0) was lost: {why}"
            self._fail(Failure(Kind.HOST_LOST, 0.0, words, Exit.HOST_LOST, self.name(0), 0))

    def stop(self, by: str, now_s: float, *, now: bool = False) -> None:
        """Somebody asks to stop; `now`: not for the first time, so at once."""
        self._now_s = now_s
        if self.stage is Stage.DONE or (self._stop_by is not None and not now):
            return
        self._record("stop asked", by=by, now=now)
        if self.stage is Stage.JOINING:
            self._done(endings.stopped_early(by))
        elif now and self._stop_by is not None:
            is_first = self.stage is Stage.RUNNING and not self._failures
            self._cut_short = f"stopped at once by {by}" if is_first else self._cut_short
            self._end()
        else:
            self._stop_by, self._stop_s = by, now_s
            self._send_all({"kind": "stop", "by": by})

    def give_up(self, verdict: Verdict) -> Verdict:
        """Agent 0 itself cannot go on: the others end too. The verdict that stands: the first one."""
        if self.verdict is None:
            self._done(verdict)
        return self.verdict or verdict

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self._now_s = now_s
        if self.stage is Stage.DONE:
            return
        if self.stage is Stage.JOINING:
            self._wait_for_all()
        else:
            self._look_for_silence()
            if self.stage is Stage.RUNNING:
                self._watch()
            if self.stage is Stage.ENDING:
                self._wait_for_end()
        if now_s - self._beat_s >= BEAT_S and self.verdict is None:
            self._beat_s = now_s
            self._send_all({"kind": "beat"})

    # Joining.

    def _wait_for_all(self) -> None:
        missing = [index for index, node in enumerate(self.nodes) if node.host is None]
        if self._failures:
            self._done(verdict_of(cause_of(self._failures)))
        elif not missing:
            self._start()
        elif self._now_s - self._began_s > self.terms.join_timeout_s:
            names = [self.name(index) for index in range(len(self.nodes))]
            late = endings.nobody_came(names, missing, self._now_s, self.terms.join_timeout_s, [*self.strangers])
            self._done(verdict_of(late))

    def _start(self) -> None:
        self._reset()
        self.start_id = secrets.token_hex(6)
        ports = self.terms.plan.master_ports
        try:
            port = self._pick_port([port for port in ports if port not in self._ports_tried] or ports)
        except UsageError as error:
            self._done(Verdict("failed", Exit.USAGE, "; ".join(error.problems)))
            return
        self._ports_tried.append(port)
        self.stage = Stage.RUNNING
        self._started_s = self._now_s
        for node in self.nodes:
            node.heard_s = self._now_s
        self._record("start", start_id=self.start_id, master_port=port, restarts=self.restarts)
        start = {"start_id": self.start_id, "master_port": port, "restart_count": self.restarts}
        self._send_all({"kind": "start", **start})
        if self._stop_by:
            self._send_all({"kind": "stop", "by": self._stop_by})

    # Running.

    def _note_beat(self, node: NodeView, message: Message) -> None:
        node.quiet_s = float(message["quiet_s"])
        overdue = []
        for rank, is_ours, step, phase, saved_step, over_s in message["ranks"]:
            view = node.ranks[int(rank)]
            view.is_ours, view.step, view.phase, view.saved_step = bool(is_ours), step, Phase(phase), saved_step
            if over_s > 0 and view.code is None:
                overdue.append(rank)
        if overdue and self.stage is Stage.RUNNING:
            view = node.ranks[overdue[0]]
            self._ask_for_evidence(f"rank {overdue[0]} made no progress in time ({view.phase.words})")

    def _note_end(self, node_rank: int, message: Message) -> None:
        node = self.nodes[node_rank]
        view = node.ranks[int(message["rank"])]
        view.code, view.ended_s = int(message["code"]), self._now_s
        view.saved_step = max(view.saved_step, message.get("saved_step", -1))
        view.step = message["step"] or view.step
        self._record("rank ended", rank=message["rank"], host=self.name(node_rank), code=view.code)
        view.is_ours = view.is_ours or bool(message.get("is_ours"))
        is_stop = view.code == Exit.STOPPED_SAVED and (self._stop_by is not None or view.is_ours)
        if view.code == Exit.FINISHED or is_stop or message["by_us"]:
            return
        if self._stop_by is not None and -view.code in endings.STOP_SIGNALS:
            return  # it knows nothing of stopping in good order: `endings.how_it_stopped` says so
        self._fail(failure_of_rank(message, self.name(node_rank), node_rank, self._now_s))

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._record("failure", what=failure.kind.name.lower().replace("_", " "), words=failure.words)
        if self._end_at_s is None:
            self._end_at_s = self._now_s + endings.WINDOW_S

    def _look_for_silence(self) -> None:
        others = [node for node in self.nodes[1:] if not node.is_lost]
        quiet_s = [self._now_s - node.heard_s for node in others]
        is_running = self.stage is Stage.RUNNING
        if is_running and len(others) > 1 and max(quiet_s) > LOST_AFTER_S and min(quiet_s) > LOST_AFTER_S - 2 * BEAT_S:
            self._find_itself_cut_off(others)
        for index, node in enumerate(self.nodes):
            if not node.is_lost and self._now_s - node.heard_s > LOST_AFTER_S:
                self.lose(
                    index,
                    f"no word from it for {LOST_AFTER_S:g} s (its network or power was cut, or it is frozen)",
                    self._now_s,
                    since_s=node.heard_s,
                )

    def _find_itself_cut_off(self, others: Sequence[NodeView]) -> None:
        """All others fell silent together: it is this host that was cut off, and they say so too."""
        why = f"no word from any of the other {len(others)} hosts for {LOST_AFTER_S:g} s (its own network was cut)"
        at_s = min(node.heard_s for node in others)
        for node in others:
            node.is_lost = True
        self._record("host lost", node_rank=0, host=self.name(0), why=why)
        self._fail(endings.host_lost(self.name(0), 0, self.terms.plan.ranks(0), self.nodes[0].step, why, at_s))

    def _watch(self) -> None:
        now_s, limit_s, idle_s = self._now_s, self.terms.time_limit_s, self.terms.idle_timeout_s
        all_gone = all(node.is_lost or node.is_through for node in self.nodes)
        if limit_s is not None and self._stop_by is None and now_s - self._began_s > self.terms.stop_after_s:
            self.stop(f"the time limit of {limit_s:g} s", now_s)
        if self._evidence_at_s is not None:
            if now_s > self._evidence_at_s or all(
                n.is_lost or len(n.evidence or ()) == len(n.ranks) for n in self.nodes
            ):
                self._judge_hang()
        elif idle_s is not None and min(node.quiet_s for node in self.nodes) > idle_s and not all_gone:
            self._ask_for_evidence(f"no rank said anything for {idle_s:g} s")
        gathers = self._evidence_at_s is not None  # which ends all ranks, and says so only thereafter
        if (all_gone and not gathers) or (self._end_at_s is not None and now_s >= self._end_at_s):
            self._end()
        elif self._stop_by is not None and now_s - self._stop_s > self.terms.grace_s and not self._failures:
            self._cut_short = f"stopped by {self._stop_by}, but not done within the grace of {self.terms.grace_s:g} s"
            self._end()

    def _ask_for_evidence(self, why: str) -> None:
        if self._evidence_at_s is None and not self._failures:
            self._evidence_at_s = self._now_s + EVIDENCE_S
            self._why_hang = why
            self._record("hang", why=why)
            self._send_all({"kind": "evidence"})

    def _judge_hang(self) -> None:
        hosts = {rank: index for index, node in enumerate(self.nodes) for rank in node.ranks}
        names = {rank: self.name(index) for rank, index in hosts.items()}
        self._evidence_at_s = None
        self._fail(endings.hang(self.nodes, names, hosts, self._now_s, self._why_hang))
        self._end()

    # Ending.

    def _end(self) -> None:
        if self.stage is Stage.RUNNING:
            self.stage = Stage.ENDING
            self._ending_s = self._now_s
            self._send_all({"kind": "end", "now": self._cut_short is not None})

    def _wait_for_end(self) -> None:
        waiting = [node for node in self.nodes if not node.is_lost and not node.has_ended]
        if waiting and self._now_s - self._ending_s < ENDING_S:
            return
        for node in waiting:
            self._record("not ended", host=node.host)
        self._conclude()

    def _conclude(self) -> None:
        if self._cut_short is not None and not all(view.ended_well for view in self._views()):
            saved = max((view.saved_step for view in self._views()), default=-1)
            rest = f"; the last checkpoint is of step {saved}" if saved >= 0 else ""
            self._done(
                Verdict(
                    "stopped",
                    Exit.STOPPED_UNSAVED,
                    self._cut_short + rest,
                    step=max(view.step for view in self._views()),
                )
            )
        elif self._failures and not (
            self._stop_by and endings.died_of_stop(self._views(), self._failures, self._stop_s)
        ):
            early = endings.left_early(
                self.nodes, [self.name(index) for index in range(len(self.nodes))], self._failures
            )
            cause = early or endings.first_cause(self._failures)
            if not self._goes_on(cause):
                self._done(verdict_of(cause, self.start_id))
        else:
            limit_s = self.terms.time_limit_s
            nobody = "a request to its ranks" if limit_s is None else f"itself, in time for the limit of {limit_s:g} s"
            self._done(endings.how_it_stopped(list(self._views()), self._stop_by, self.start_id, nobody))

    def _goes_on(self, cause: Failure) -> bool:
        """Whether the job is started once more."""
        if self._stop_by is not None or any(node.is_lost for node in self.nodes):
            return False
        if endings.is_port_taken(cause, self._ports_tried[-1]) and self._ports_lost < PORT_TRIES:
            self._ports_lost += 1
            self._record("port taken", words=cause.words)
        elif cause.exit_code in (Exit.RANK_FAILED, Exit.HANG) and self.restarts < self.terms.max_restarts:
            self.restarts += 1
            where = endings.where_it_goes_on(self._views())
            self._record("restart", number=self.restarts, of=self.terms.max_restarts, after=cause.words, where=where)
        else:
            return False
        self._start()
        return True

    def _done(self, verdict: Verdict) -> None:
        self.stage = Stage.DONE
        self.verdict = verdict
        self._record("verdict", **{k: v for k, v in verdict.as_dict().items() if k != "evidence"})
        self._send_all({"kind": "verdict", "verdict": verdict.as_dict()})

    # Small things.

    def _send_all(self, message: Message) -> None:
        for index, node in enumerate(self.nodes):
            if node.host is not None and not node.is_lost:
                self._send(index, message)

    def name(self, node_rank: int) -> str:
        """What a host is called."""
        node = self.nodes[node_rank]
        return self.terms.name_of(node_rank) or node.host or node.name

    def _views(self) -> Iterable[RankView]:
        return (view for node in self.nodes for view in node.ranks.values())
