"""Strategies that are wrong, each in a way that people get wrong: `python -m train verify` must catch and name all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from train.config import StrategyConfig
from train.runtime import Runtime
from train.strategies import DistributedDataParallel, Manual


class Right(Manual):
    """Nothing is wrong with this one."""


class NoAllReduce(Manual):
    """Each rank trains by itself."""

    def reduce_gradients(self) -> None:
        return


class SumNotMean(DistributedDataParallel):
    """ddp's average is undone twice."""

    def __init__(self, config: StrategyConfig, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.loss_scale *= runtime.world_size


class OneLeftOut(Manual):
    """The last layer's bias is in no bucket."""

    def wrap(self, objective: nn.Module) -> None:
        super().wrap(objective)
        self.left_out = list(objective.parameters())[-1]
        self.buckets = [[p for p in bucket if p is not self.left_out] for bucket in self.buckets]


class LocalClip(Manual):
    """Each rank clips what it has before all is added up."""

    def reduce_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.2)
        super().reduce_gradients()


class NominalWindow(Manual):
    """Every micro-batch counts for as much as a whole one."""

    def forward(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, count = super().forward(batch)
        self.usual = max(getattr(self, "usual", 0), int(count))
        return loss_sum, torch.full_like(count, self.usual)


class NoBroadcast(Manual):
    """Takes the weights as each rank has made them."""

    def wrap(self, objective: nn.Module) -> None:
        kept = [p.detach().clone() for p in objective.parameters()]
        super().wrap(objective)
        for parameter, mine in zip(objective.parameters(), kept, strict=True):
            parameter.detach().copy_(mine)


class DividedTwice(Manual):
    """A mean of what is a mean already."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
