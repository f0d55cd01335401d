"""Rank 0 alone changes its learning rate.

All ranks get the same averaged gradient, but one takes smaller steps with it. From there on the replicas are different
models, each trained with gradients of the other's. DDP compares nothing: no error comes, ever.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team, line_through_zero

STEPS = 10
RATE = 0.1


def wrong(team: Team) -> float:
    """Halve the rate half-way, where `rank == 0`."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        if step == STEPS // 2 and team.rank == 0:
            optimizer.param_groups[0]["lr"] = RATE / 2
        update(model, optimizer)
    return told(team, model)


def right(team: Team) -> float:
    """Every rank works the rate out for itself, from the step alone."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.param_groups[0]["lr"] = RATE / 2
        update(model, optimizer)
    return told(team, model)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step down the parabola weight² / 2, whose gradient is the weight."""
    loss = model(torch.ones(1, 1)).square().sum() / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def told(team: Team, model: torch.nn.Module) -> float:
    """How far apart the ranks' weights are."""
    weights = team.everyones(next(model.parameters()))
    team.say(", ".join(f"rank {rank} ends at weight {weight:.5f}" for rank, weight in enumerate(weights)))
    return max(weights) - min(weights)
