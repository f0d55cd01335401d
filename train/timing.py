"""Where the time of a step goes: a few marks in the loop, each a store into the rank's status page.

Such a mark costs about a microsecond. On a GPU the host only queues work and waits somewhere else for it, so that
it cannot tell computing from waiting for other ranks: there all of a step but its data counts as computing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

from train.health import Health
from train.seam import Activity
from train.strategies import Strategy

T = TypeVar("T")


class Timing:
    """A rank's marks. The activities of one step follow each other; a mark ends the one before."""

    def __init__(self, health: Health, device: torch.device, strategy: Strategy | None = None) -> None:
        """
        Args:
            health: takes the times.
            device: the rank's.
            strategy: knows where within backward the waiting for other ranks begins, if it does.
        """
        is_blind = device.type == "cuda"
        self._mark = health.doing
        self.doing: Callable[[Activity], None] = self._say_computing if is_blind else health.doing
        """From here on a step's time goes into this. No method: that call would double what it costs."""
        if strategy is not None and not is_blind:
            strategy.before_waiting(partial(health.doing, Activity.WAITING))

    def _say_computing(self, _: Activity) -> None:
        self._mark(Activity.COMPUTING)

    def of_data(self, windows: Iterator[T]) -> Iterator[T]:
        """The same windows; the time until each is there goes into data, what follows into computing."""
        mark, data, computing = self._mark, Activity.DATA, Activity.COMPUTING
        mark(data)
        for window in windows:
            mark(computing)
            yield window
            mark(data)
