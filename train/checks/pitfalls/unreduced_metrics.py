"""Rank 0 prints its own loss as the loss.

It is the mean of that rank's samples alone: of two ranks half the data, and of another half with each number of ranks.
The gradients are right, so only the curve that everybody looks at is wrong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from train.checks.pitfalls.team import Team


def wrong(team: Team) -> float:
    """`if rank == 0: print(loss.item())`."""
    losses = losses_of(team.rank)
    loss = losses.mean()
    return told(team, loss)


def right(team: Team) -> float:
    """Sum and count over all ranks, then divide: also right where the counts differ."""
    losses = losses_of(team.rank)
    totals = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
    dist.all_reduce(totals)
    loss = totals[0] / totals[1]
    return told(team, loss)


def losses_of(rank: int) -> torch.Tensor:
    """Three samples on rank 0 with losses around 2, one on each other rank with a loss of 10."""
    return torch.tensor([1.0, 2.0, 3.0] if rank == 0 else [10.0])


def told(team: Team, loss: torch.Tensor) -> float:
    """What rank 0 would print."""
    means = team.everyones(losses_of(team.rank).mean())
    team.say(f"means by rank: {', '.join(f'{mean:g}' for mean in means)}; rank 0 prints {loss:g}")
    return float(loss)
