"""What was agreed for a job, and what agent 0 knows of its hosts and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from train.launch.topology import Plan
from train.seam import Exit, Phase


class Stage(Enum):
    """Where a start is."""

    JOINING = "joining"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True)
class Terms:
    """What was agreed on the command line."""

    plan: Plan
    command: tuple[str, ...]
    join_timeout_s: float = 120.0
    grace_s: float = 300.0
    max_restarts: int = 0
    idle_timeout_s: float | None = None
    time_limit_s: float | None = None
    names_given: bool = False
    """The plan's host names are people's own; else a host is called what it calls itself."""

    @property
    def is_ours(self) -> bool:
        """Whether it is `python -m train run`, which stops by its page and chooses the run folder itself."""
        return ("train", "run") in pairwise(self.command)

    @property
    def stop_after_s(self) -> float:
        """When to ask for the stop so that it is over by the time limit.

        Ours knows how long its steps and saves take, and stops by itself in time: it is asked only in case.
        """
        limit_s = self.time_limit_s or 0.0
        return max(limit_s / 2, limit_s - min(self.grace_s, limit_s / 10 if self.is_ours else self.grace_s))

    def name_of(self, node_rank: int) -> str | None:
        """The name people gave a host."""
        return self.plan.hosts[node_rank].name if self.names_given else None


# Not dataclasses: each costs milliseconds at every start of an agent.


class RankView:
    """What agent 0 knows of a rank."""

    def __init__(self) -> None:
        self.is_ours = False
        self.step = 0
        self.phase = Phase.STARTING
        self.saved_step = -1
        self.code: int | None = None
        self.ended_s = 0.0

    @property
    def ended_well(self) -> bool:
        """Whether it came to its end, or stopped with a good checkpoint."""
        return self.code in (Exit.FINISHED, Exit.STOPPED_SAVED)


class NodeView:
    """What agent 0 knows of a host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host: str | None = None
        """Its own host name, once it is here."""
        self.agent: Any = None
        """Its agent's own mark."""
        self.heard_s = 0.0
        self.is_lost = False
        self.has_ended = False
        self.quiet_s = 0.0
        self.ranks: dict[int, RankView] = {}
        self.evidence: dict[int, Any] | None = None

    @property
    def is_through(self) -> bool:
        """Whether all of its ranks have ended."""
        return all(view.code is not None for view in self.ranks.values())

    @property
    def step(self) -> int | None:
        """The furthest of its ranks' steps; None before the first."""
        return max((view.step for view in self.ranks.values()), default=0) or None
