"""One rank has a batch more than the other.

It waits in an all-reduce that the other, through with its data, never enters. `drop_last` or padding in the sampler
hide this, at the price of samples lost or counted twice; a loader of one's own has neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team, line_through_zero

BATCHES = ([[1.0], [2.0], [3.0]], [[4.0], [5.0]])
"""Rank 0's, and those of all others."""


def wrong(team: Team) -> float:
    """Each rank goes through what it has."""
    model = DistributedDataParallel(line_through_zero(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mine = BATCHES[min(team.rank, 1)]
    for step in range(len(mine)):
        loss = model(torch.tensor([mine[step]])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        team.beat()
    dist.barrier()
    return told(team, model)


def right(team: Team) -> float:
    """All take the longest one's number of steps: where the data is out, something stands in and counts for nothing."""
    model = DistributedDataParallel(line_through_zero(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mine = BATCHES[min(team.rank, 1)]
    steps = torch.tensor(len(mine))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for step in range(int(steps)):
        batch = mine[step] if step < len(mine) else mine[0]
        count = torch.tensor(float(len(batch)) if step < len(mine) else 0.0)
        total = count.clone()
        dist.all_reduce(total)
        loss = model(torch.tensor([batch])).mean() * count * team.size / total  # DDP divides by the number of ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        team.beat()
    dist.barrier()
    return told(team, model)


def told(team: Team, model: torch.nn.Module) -> float:
    """Where the weight has gone: from 0 down by each step's mean of all inputs."""
    weights = team.everyones(next(model.parameters()))
    team.say(f"all ranks came through; their weights are {', '.join(f'{weight:g}' for weight in weights)}")
    return weights[0]
