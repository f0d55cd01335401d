"""The last, partial window of an epoch is divided by the size of a full one.

Five micro-batches in windows of four leave one over. Divided by four, it counts a quarter of what it should: the last
step of every epoch is too small. To take no step with it is worse: see leftover_gradients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team, line_through_zero

WINDOW = 4
INPUTS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""One micro-batch each, the same on every rank."""


def wrong(team: Team) -> float:
    """Each loss is divided by the window's usual size."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updates = []
    for start in range(0, len(INPUTS), WINDOW):
        window = INPUTS[start : start + WINDOW]
        for value in window:
            (model(torch.tensor([[value]])).sum() / WINDOW).backward()
        updates.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return told(team, updates)


def right(team: Team) -> float:
    """By the number of micro-batches that there are."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updates = []
    for start in range(0, len(INPUTS), WINDOW):
        window = INPUTS[start : start + WINDOW]
        for value in window:
            (model(torch.tensor([[value]])).sum() / len(window)).backward()
        updates.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return told(team, updates)


def gradient_of(model: nn.Module) -> float:
    """What the optimizer is about to use."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return float(gradient)


def told(team: Team, updates: list[float]) -> float:
    """The last window's gradient as a share of its mean, which is the one input that is left."""
    team.say(f"gradients of the updates: {', '.join(f'{gradient:g}' for gradient in updates)}")
    team.say(f"the last window's only micro-batch has gradient {INPUTS[-1]:g}")
    return updates[-1] / INPUTS[-1]
