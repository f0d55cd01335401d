"""What both kinds of agent have in common: the one that leads, and those that follow it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from train import __version__
from train.launch.clock import AwakeClock
from train.launch.node import Node
from train.launch.options import NodeOptions
from train.launch.output import Console
from train.launch.verdict import Verdict
from train.launch.wire import Message

TICK_S = 0.2


class Half(ABC):
    """An agent's ties to the other hosts' agents, beside its `Node`, which has the ranks."""

    def __init__(self, options: NodeOptions, node: Node, console: Console, clock: AwakeClock) -> None:
        self.options, self.terms = options, options.terms
        self.node, self.console, self.clock = node, console, clock
        self._mark = os.urandom(8).hex()
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def open(self) -> None:
        """Find the other agents. Raises UsageError."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """This host's word to agent 0."""

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """Time has passed."""

    @abstractmethod
    async def close(self) -> None:
        """Part from the others, after the last word."""

    async def run(self) -> Verdict:
        """From the first hello to the verdict. Raises UsageError."""
        await self.open()
        while not self._verdict.done():
            now_s = self.clock.tick()
            self.node.tick(now_s, self.clock.awake_since_s)
            self.tick(now_s)
            await asyncio.wait([self._verdict], timeout=TICK_S)
        return self._verdict.result()

    def decide(self, verdict: Verdict) -> None:
        """The first verdict stands."""
        if not self._verdict.done():
            self._verdict.set_result(verdict)

    @property
    def verdict(self) -> Verdict:
        """What was decided."""
        return self._verdict.result()

    def ask_to_stop(self, by: str, *, now: bool, from_afar: bool = False) -> None:
        """Somebody asks this agent to stop the job; `now`: not for the first time; `from_afar`: not on this host."""
        self.tell({"kind": "stop", "by": by, "now": now, "from_afar": from_afar})

    def greeting(self) -> dict[str, Any]:
        """Who this is, for agent 0."""
        return {
            "node_rank": self.options.node_rank,
            "nnodes": len(self.terms.plan.hosts),
            "slots": slots_words(host.slots for host in self.terms.plan.hosts),
            "job": self._job(),
            "host": socket.gethostname(),
            "agent": self._mark,
            "version": __version__,
        }

    def _job(self) -> str:
        """What tells this job from another one with the same secret: equal on all its agents."""
        plan, command = self.terms.plan, list(self.terms.command)
        if command[:1] == [sys.executable]:  # it may lie elsewhere on another host
            command[0] = "python"
        told = json.dumps([command, self.options.run_id, plan.master_addr, plan.master_ports[0]])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def slots_words(slots: Iterable[int]) -> str:
    """Ranks a host, as `--nproc-per-node` takes them, equal ones together: `8(x4),4`."""
    counts = [(count, len(list(same))) for count, same in groupby(slots)]
    words = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in counts)
    return words if len(words) <= 200 else f"{words[:200]}… {hashlib.sha256(words.encode()).hexdigest()[:16]}"


def asleep(slept_s: float) -> str:
    """Why a host was lost that was frozen."""
    return f"it did not run for {slept_s:.0f} s (frozen, suspended or starved), so the others have given it up"
