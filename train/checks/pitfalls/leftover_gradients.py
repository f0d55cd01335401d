"""The last, partial window of an epoch takes no step, and its gradients stay.

`if (i + 1) % 4 == 0: step; zero_grad` leaves the fifth of five micro-batches without a step. Nobody clears its
gradient: it is still there when the next epoch begins, and is added to that epoch's first step.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team, line_through_zero

WINDOW = 4
INPUTS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""One micro-batch each, the same on every rank and in each of two epochs."""


def wrong(team: Team) -> float:
    """A step after each full window."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs: list[list[float]] = []
    for _ in range(2):
        epochs.append([])
        for number, value in enumerate(INPUTS, 1):
            (model(torch.tensor([[value]])).sum() / WINDOW).backward()
            if number % WINDOW == 0:
                epochs[-1].append(gradient_of(model))
                optimizer.step()
                optimizer.zero_grad()
    return told(team, epochs)


def right(team: Team) -> float:
    """Also after the last one, divided by what there is of it."""
    model = DistributedDataParallel(line_through_zero())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epochs: list[list[float]] = []
    for _ in range(2):
        epochs.append([])
        for number, value in enumerate(INPUTS, 1):
            size = WINDOW if number <= len(INPUTS) // WINDOW * WINDOW else len(INPUTS) % WINDOW
            (model(torch.tensor([[value]])).sum() / size).backward()
            if number % WINDOW == 0 or number == len(INPUTS):
                epochs[-1].append(gradient_of(model))
                optimizer.step()
                optimizer.zero_grad()
    return told(team, epochs)


def gradient_of(model: torch.nn.Module) -> float:
    """What the optimizer is about to use."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return float(gradient)


def told(team: Team, epochs: list[list[float]]) -> float:
    """The second epoch's first gradient beside the first epoch's, on the same data: a straight line has but one."""
    for number, gradients in enumerate(epochs):
        team.say(f"epoch {number}: gradients of the updates {', '.join(f'{gradient:g}' for gradient in gradients)}")
    return epochs[1][0] / epochs[0][0]
