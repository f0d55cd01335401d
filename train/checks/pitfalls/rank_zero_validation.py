"""Rank 0 alone validates, through the DDP wrapper.

A wrapped model with buffers (BatchNorm) starts each forward with a broadcast of rank 0's buffers. Rank 0 calls it once
more than the others: from there on its collectives and theirs are different ones, and all wait for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team

INPUTS = torch.linspace(-1, 1, 7).unsqueeze(1)
"""Seven samples to validate with: not the same number for each of two ranks."""


def wrong(team: Team) -> float:
    """`if rank == 0: validate(model)`, while the others go on to the barrier."""
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = 0.0
    for _ in range(2):
        update(model, optimizer, team)
        if team.rank == 0:
            loss = validate(model, INPUTS) / len(INPUTS)
        dist.barrier()
    return told(team, model, loss)


def right(team: Team) -> float:
    """All ranks validate, each its own part, with the bare model; one sum over all of them."""
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = 0.0
    for _ in range(2):
        update(model, optimizer, team)
        part = torch.tensor(validate(model.module, INPUTS[team.rank :: team.size]))
        dist.all_reduce(part)
        loss = float(part) / len(INPUTS)
        dist.barrier()
    return told(team, model, loss)


def small_model() -> nn.Module:
    """With BatchNorm, and so with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """One step on samples that are the same on all ranks, so that their buffers are too."""
    optimizer.zero_grad()
    model.train()(torch.linspace(0, 1, 6).unsqueeze(1)).square().mean().backward()
    optimizer.step()
    team.beat()


@torch.no_grad()
def validate(model: nn.Module, inputs: torch.Tensor) -> float:
    """Sum of squared errors."""
    return float(model.eval()(inputs).square().sum())


def told(team: Team, model: DistributedDataParallel, loss: float) -> float:
    """How far the loss is from that of one process that validates alone."""
    alone = validate(model.module, INPUTS) / len(INPUTS)
    team.say(f"the ranks' loss of {len(INPUTS)} samples is {loss:.6f}, that of one process alone {alone:.6f}")
    return abs(loss - alone)
