"""Gradients are accumulated over micro-batches, but sent after each of them.

DDP sends in every backward, but only the last one of a window needs it. The result is the same; the network carries as
many times as much as there are micro-batches.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.checks.pitfalls.team import Team

MICRO_BATCHES = 4
UPDATES = 3


def wrong(team: Team) -> float:
    """Forward and backward, as often as there are micro-batches."""
    model, sent = counting(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(UPDATES):
        for number in range(1, MICRO_BATCHES + 1):
            (loss_of(model, number) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(team, model, sent)


def right(team: Team) -> float:
    """The same, under `no_sync` but for the last one."""
    model, sent = counting(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(UPDATES):
        for number in range(1, MICRO_BATCHES + 1):
            with nullcontext() if number == MICRO_BATCHES else model.no_sync():
                (loss_of(model, number) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return told(team, model, sent)


def counting(module: nn.Module) -> tuple[DistributedDataParallel, list[int]]:
    """A wrapped module, and the bytes of each gradient bucket that it sends."""
    nn.init.constant_(module.weight, 0.01)  # type: ignore[arg-type]
    nn.init.constant_(module.bias, 0.0)  # type: ignore[arg-type]
    model, sent = DistributedDataParallel(module), []

    def hook(state: None, bucket: Any) -> Any:
        sent.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP checks them, and wants types rather than their names
    model.register_comm_hook(None, hook)
    return model, sent


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Of the micro-batch of that number."""
    loss: torch.Tensor = model(torch.full((8, 256), number / 10)).square().mean()
    return loss


def told(team: Team, model: nn.Module, sent: list[int]) -> float:
    """All-reduces of gradients for each update."""
    kib = sum(sent) / UPDATES / 1024
    weight = float(next(model.parameters()).flatten()[0])
    team.say(f"{len(sent)} all-reduces in {UPDATES} updates, {kib:.0f} KiB an update; a weight ends at {weight:.6f}")
    return len(sent) / UPDATES
