"""Gradients are clipped while they are still scaled.

For float16 a scaler multiplies the loss, 65536-fold at first, so that small gradients do not vanish. Clipped before
they are unscaled, they come out 65536 times smaller than the limit. The loss hardly moves, and nothing says so.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from train.checks.pitfalls.team import Team

LIMIT = 1.0


def wrong(team: Team) -> float:
    """backward → clip → step, which unscales by itself."""
    model, optimizer, scaler = parts()
    scaler.scale(loss_of(model)).backward()
    clip_grad_norm_(model.parameters(), LIMIT)
    scaler.step(optimizer)
    scaler.update()
    return told(team, model)


def right(team: Team) -> float:
    """backward → unscale → clip → step."""
    model, optimizer, scaler = parts()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), LIMIT)
    scaler.step(optimizer)
    scaler.update()
    return told(team, model)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    """A model at zero, an optimizer that steps by the whole gradient, and a scaler as it comes."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")


def loss_of(model: nn.Module) -> torch.Tensor:
    """Its gradient is (3, 4): five long, and so to be cut to the limit."""
    loss: torch.Tensor = model(torch.tensor([[3.0, 4.0]])).sum()
    return loss


def told(team: Team, model: nn.Module) -> float:
    """Length of the step that was taken."""
    weights = next(model.parameters()).flatten().tolist()
    team.say(f"the weights went from (0, 0) to ({weights[0]:.2e}, {weights[1]:.2e}) by a gradient of (3, 4)")
    return float(next(model.parameters()).norm())
