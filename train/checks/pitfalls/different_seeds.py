"""The ranks begin with different weights, and average gradients by hand.

DDP broadcasts rank 0's weights when it wraps a model; a loop with an all-reduce of one's own does not. The ranks take
the same steps from different places: what lay between them at the start stays there for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from train.checks.pitfalls.team import Team

STEPS = 20


def wrong(team: Team) -> float:
    """Each rank seeds with its own number, for its data say, and builds the model after that."""
    torch.manual_seed(team.rank)
    model = nn.Linear(1, 1)
    apart = team.apart(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        update(model, optimizer, team)
    return told(team, model, apart)


def right(team: Team) -> float:
    """Rank 0's weights to all, before the first step."""
    torch.manual_seed(team.rank)
    model = nn.Linear(1, 1)
    apart = team.apart(model.parameters())
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        update(model, optimizer, team)
    return told(team, model, apart)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """One step with the mean of all ranks' gradients, averaged by hand."""
    optimizer.zero_grad()
    (model(torch.ones(4, 1)) - 1).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= team.size
    optimizer.step()


def told(team: Team, model: nn.Module, apart: float) -> float:
    """How far apart the ranks' parameters are, as a share of what their seeds put between them."""
    now = team.apart(model.parameters())
    team.say(f"the seeds put {apart:.6f} between the ranks' parameters; after {STEPS} equal steps it is {now:.6f}")
    return now / apart
