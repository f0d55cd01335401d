"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from train.strategies.base import Strategy


class Baseline(Strategy):
    """What the others must equal."""

    needs_group: ClassVar[bool] = False

    def wrap(self, objective: nn.Module) -> None:
        self.module = objective

    def forward(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sums, counts = self.module(*batch)
        return loss_sums.sum(), counts.sum()
