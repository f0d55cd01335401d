"""An agent that is not agent 0: it calls that one, obeys it, and ends by itself when it is gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from train import network
from train.errors import UsageError
from train.launch import wire
from train.launch.clock import LOST_AFTER_S
from train.launch.endings import AFTER_A_LOSS, stopped_early
from train.launch.half import Half, asleep
from train.launch.node import tell_of_error
from train.launch.options import is_name
from train.launch.verdict import Verdict
from train.launch.wire import Message, Wire, WireError
from train.seam import Exit

_AGAIN_S = 0.2
_ANSWER_S = wire.HANDSHAKE_S + 1.0  # not before agent 0 gives up itself, which is slow where many call at once


class Follower(Half):
    """The half of every agent but agent 0."""

    _wire: Wire | None = None
    _listening: asyncio.Task[None] | None = None
    _heard_s = 0.0
    _leader: str | None = None

    async def open(self) -> None:
        """Call agent 0 until it answers."""
        called = await self._call()
        if isinstance(called, Verdict):
            self.decide(called)
            return
        self._wire = called
        self._heard_s = self.clock.tick()
        self.node.interface = network.interface_of(called.local_address)
        self._listening = asyncio.create_task(self._listen(called))
        self._listening.add_done_callback(tell_of_error)

    def tell(self, message: Message) -> None:
        """By the wire."""
        if self._wire is not None:
            self._wire.send(message)

    def ask_to_stop(self, by: str, *, now: bool, from_afar: bool = False) -> None:
        """As long as agent 0 has not answered, nothing has begun."""
        if self._wire is None:
            self.decide(stopped_early(by))
        super().ask_to_stop(by, now=now, from_afar=from_afar)

    def tick(self, now_s: float) -> None:
        """Agent 0 must be heard of."""
        # Before the start nobody loses anything by patience, and many who start at once may starve each other.
        patience_s = LOST_AFTER_S if self.node.start_id else max(LOST_AFTER_S, self.terms.join_timeout_s)
        if self._wire is not None and now_s - self._heard_s > patience_s:
            self._orphaned(f"no word from it for {patience_s:g} s (the network between was cut, or it is frozen)")

    async def close(self) -> None:
        """Part."""
        if self._listening is not None:
            self._listening.cancel()
        if self._wire is not None:
            await self._wire.close()

    async def _call(self) -> Wire | Verdict:
        plan, began_s = self.terms.plan, time.monotonic()
        ports = plan.control_ports
        unreached: dict[int, str] = {}
        answered: dict[int, str] = {}  # tells more than that nobody is there any more
        self.console.say(f"host {self.options.node_rank} of {len(plan.hosts)}: calling agent 0 at {plan.master_addr}")
        while time.monotonic() - began_s < self.terms.join_timeout_s:
            for port in ports:
                if self._verdict.done():  # a stop request
                    return self._verdict.result()
                call = wire.call(plan.master_addr, port, self.options.secret, self.greeting(), _ANSWER_S)
                calling = asyncio.create_task(call)
                either: list[asyncio.Future[Any]] = [calling, self._verdict]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():  # a stop request
                    calling.cancel()
                    return self._verdict.result()
                try:
                    called, answer = calling.result()
                except WireError as error:
                    answered[port] = str(error)
                    continue
                except (OSError, EOFError, TimeoutError) as error:
                    unreached[port] = str(error) or type(error).__name__
                    continue
                if not answer.get("refused"):
                    self._leader = answer.get("host")
                    return called
                called.abort()
                if answered.get(port) != answer["refused"]:
                    self.console.say(f"refused at port {port}: {answer['refused']}; trying on")
                answered[port] = str(answer["refused"])
                if answered[port].startswith("--"):  # of this job, but started otherwise: no waiting will mend that
                    return Verdict("failed", Exit.USAGE, f"agent 0 refused this agent: {answered[port]}")
            await asyncio.wait([self._verdict], timeout=_AGAIN_S)
        told = "; ".join(f"port {port}: {why}" for port, why in list((answered | unreached | answered).items())[:3])
        return Verdict(
            "failed",
            Exit.NEVER_JOINED,
            f"agent 0 at {plan.master_addr} did not answer within {self.terms.join_timeout_s:g} s ({told})",
            advice="is it started, is the address right, does a firewall let the port through, is the secret the same?",
        )

    async def _listen(self, called: Wire) -> None:
        try:
            while True:
                message = await called.receive()
                self._heard_s = self.clock.now()
                if message["kind"] == "verdict":
                    self.decide(Verdict(**message["verdict"]))
                    return
                if message["kind"] == "start":
                    self.node.start_id = message["start_id"]
                if message["kind"] == "start" and message.get("run_id") and self.node.folder.path is None:
                    if not is_name(message["run_id"]):
                        raise WireError(f"a run called {message['run_id']!r}")
                    self.node.folder_is(self.options.runs_dir / message["run_id"])
                self.node.obey(message)
        except (EOFError, OSError):
            self._orphaned("the connection to its agent ended (the agent or its host was killed or rebooted)")
        except UsageError as error:  # the run folder cannot be written here
            self._wire = called
            self.tell({"kind": "failed", "words": "; ".join(error.problems), "exit_code": int(Exit.USAGE)})
            await self._listen(called)
        except (WireError, LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            self._orphaned(f"it sent what cannot be understood ({error})")

    def _orphaned(self, why: str) -> None:
        """Agent 0 is gone, or cannot be reached: this host ends its ranks by itself."""
        name, node_rank = self.terms.name_of(0) or self._leader or self.terms.plan.master_addr, 0
        self.clock.tick()
        if self.clock.slept_s and time.monotonic() - self.clock.awake_since_s < LOST_AFTER_S:
            name, node_rank, why = self.node.name, self.node.node_rank, asleep(self.clock.slept_s)
        words = f"host {name} (node rank {node_rank}) was lost: {why}"
        start_id = self.node.start_id or None
        lost = Verdict("failed", Exit.HOST_LOST, words, name, node_rank, advice=AFTER_A_LOSS, start_id=start_id)
        self.decide(lost)
