"""One process, several GPUs: `nn.DataParallel` scatters each micro-batch over them and gathers the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from train.config import StrategyConfig
from train.runtime import Runtime
from train.strategies.base import Strategy

Batch = tuple[torch.Tensor, ...]
Split = Callable[[Batch], list[Batch]]


class DataParallel(Strategy):
    """The easy way to several GPUs of one host; slower than ddp, which is preferred everywhere.

    Chunks are uneven when a micro-batch does not divide: each replica returns a sum and a count, added up
    outside, so that no mean of means creeps in (pytorch#9226).
    """

    needs_group: ClassVar[bool] = False

    def __init__(self, config: StrategyConfig, runtime: Runtime, split: Split | None = None) -> None:
        """`split` stands in for the scatter over GPUs, so that uneven chunks can be tried where there are none."""
        super().__init__(config, runtime)
        self.split = split
        self.note: str | None = None
        """What the user should know: there may be nothing to split over."""

    def wrap(self, objective: nn.Module) -> None:
        """Over all GPUs this process sees; alone where there are none, with a note."""
        self.module = objective
        gpus = torch.cuda.device_count() if self.runtime.device.type == "cuda" else 0
        if self.split is not None:
            self.module = _Chunked(objective, self.split)
        elif gpus > 1:
            self.module = nn.DataParallel(objective, device_ids=list(range(gpus)), output_device=0)
        else:
            found = "one GPU" if gpus else "no GPU"
            self.note = f"dp found {found} to split batches over: training on {self.runtime.device} alone, as baseline"


class _Chunked(nn.Module):
    """DataParallel's arithmetic on one device: each chunk by itself, the results side by side."""

    def __init__(self, module: nn.Module, split: Split) -> None:
        super().__init__()
        self.module = module
        self.split = split

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results = [self.module(*chunk) for chunk in self.split(batch)]
        return torch.cat([loss_sum for loss_sum, _ in results]), torch.cat([count for _, count in results])
