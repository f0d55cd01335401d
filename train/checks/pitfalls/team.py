"""What a lesson needs of its rank: who it is among the others, what all of them hold, and a place for what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn


class Team:
    """One rank among the others, which run the same lesson at the same time."""

    def __init__(self, rank: int, size: int, beat: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            rank: this process's.
            size: number of ranks.
            beat: tells the agent that this rank got on.
        """
        self.rank, self.size = rank, size
        self.beat = beat
        self.said: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line of what happened; rank 0's lines are shown."""
        self.said.append(text)

    def everyones(self, value: float | torch.Tensor) -> list[float]:
        """Each rank's number, in rank order, on every rank: only to measure, no part of any lesson."""
        values: list[float] = [0.0] * self.size
        dist.all_gather_object(values, float(value))
        return values

    def apart(self, tensors: Iterable[torch.Tensor]) -> float:
        """Largest difference between what two ranks hold in the same place."""
        mine = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        return float((high - low).max())


def line_through_zero(weight: float = 1.0) -> nn.Linear:
    """The smallest model: output = weight · input. What happens to it can be worked out on paper."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model
