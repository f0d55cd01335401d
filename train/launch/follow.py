"""An agent that is not agent 0: it calls that one, obeys it, and ends by itself when it is gone."""

from __future__ import annotations

import asyncio
import time

from train import network
from train.launch import wire
from train.launch.clock import LOST_AFTER_S
from train.launch.endings import AFTER_A_LOSS, stopped_early
from train.launch.half import Half, asleep
from train.launch.verdict import Verdict
from train.launch.wire import Message, Wire, WireError
from train.seam import Exit

_AGAIN_S = 0.5
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

    def tell(self, message: Message) -> None:
        """By the wire."""
        if self._wire is not None:
            self._wire.send(message)

    def ask_to_stop(self, by: str, *, now: bool) -> None:
        """As long as agent 0 has not answered, nothing has begun."""
        if self._wire is None:
            self.decide(stopped_early(by))
        super().ask_to_stop(by, now=now)

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
        seen: dict[int, str] = {}
        self.console.say(f"host {self.options.node_rank} of {len(plan.hosts)}: calling agent 0 at {plan.master_addr}")
        while time.monotonic() - began_s < self.terms.join_timeout_s:
            for port in ports:
                if self._verdict.done():  # a stop request
                    return self._verdict.result()
                try:
                    called, answer = await wire.call(
                        plan.master_addr, port, self.options.secret, self.greeting(), _ANSWER_S
                    )
                except (OSError, EOFError, WireError, TimeoutError) as error:
                    seen[port] = str(error) or type(error).__name__
                    continue
                if answer.get("refused"):
                    called.abort()
                    return Verdict("failed", Exit.USAGE, f"agent 0 refused this agent: {answer['refused']}")
                self._leader = answer.get("host")
                return called
            await asyncio.sleep(_AGAIN_S)
        told = "; ".join(f"port {port}: {why}" for port, why in list(seen.items())[:3])
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
                if message["kind"] == "start" and message.get("run_id") and self.node.folder.path is None:
                    self.node.folder_is(self.options.runs_dir / message["run_id"])
                self.node.obey(message)
        except (EOFError, OSError):
            self._orphaned("the connection to its agent ended (the agent or its host was killed or rebooted)")
        except (WireError, KeyError, TypeError, ValueError) as error:
            self._orphaned(f"it sent what cannot be understood ({error})")

    def _orphaned(self, why: str) -> None:
        """Agent 0 is gone, or cannot be reached: this host ends its ranks by itself."""
        name, node_rank = self.terms.name_of(0) or self._leader or self.terms.plan.master_addr, 0
        self.clock.tick()
        if self.clock.slept_s and time.monotonic() - self.clock.awake_since_s < LOST_AFTER_S:
            name, node_rank, why = self.node.name, self.node.node_rank, asleep(self.clock.slept_s)
        words = f"host {name} (node rank {node_rank}) was lost: {why}"
        self.decide(Verdict("failed", Exit.HOST_LOST, words, name, node_rank, advice=AFTER_A_LOSS))
