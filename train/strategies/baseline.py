"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from train.strategies.base import Strategy


class Baseline(Strategy):
    """What the others must equal."""

    needs_group: ClassVar[bool] = False

    def wrap(self, objective: nn.Module) -> None:
        """Nothing to add."""
        self.module = objective
