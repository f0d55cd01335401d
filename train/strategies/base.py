"""What every strategy does. The loop calls these methods in this order, and knows no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from train.config import StrategyConfig
from train.runtime import Runtime
from train.seam import Phase


class Strategy(ABC):
    """One way to train one model on one or many devices.

    Contract: after the last micro-batch's backward and `reduce_gradients`, each parameter's gradient on each
    rank is the sum over all ranks of what that rank called backward on, with `loss_scale` counted in.
    """

    needs_group: ClassVar[bool]
    """Whether it talks to other ranks, even if there is but one."""

    module: nn.Module
    """What forward runs: the objective, or a wrapper around it."""

    def __init__(self, config: StrategyConfig, runtime: Runtime) -> None:
        self.config = config
        self.runtime = runtime
        self.loss_scale = 1.0
        """What backward's loss must be multiplied with: undoes an average over ranks."""

    @abstractmethod
    def wrap(self, objective: nn.Module) -> None:
        """Take over the model with its loss, on this rank's device, equal on all ranks from here on."""

    def settle(self, batch: tuple[torch.Tensor, ...]) -> None:
        """Before a start's first step, with its first micro-batch: adapt now to what would be learned in that step.

        So a run that goes on adds in the same order as one that was never stopped. Leaves no trace in weights,
        gradients or buffers.
        """
        return

    def forward(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses, number of items) of a micro-batch: scalars; the first one carries the graph."""
        loss_sums, counts = self.module(*batch)  # one of each a replica
        return loss_sums.sum(), counts.sum()

    def hold_gradients(self) -> AbstractContextManager[object]:
        """Around forward and backward of every micro-batch but the last: keep gradients here, do not send them."""
        return nullcontext()

    def before_waiting(self, mark: Callable[[], None]) -> None:
        """Where backward itself waits for other ranks: call `mark` from now on in each step just before it does."""
        return

    def reduce_gradients(self) -> None:
        """After the last backward: make the gradients those of the global batch, if that is not done yet."""
        return

    def sync_buffers(self) -> None:
        """After each step: give every rank the first one's buffers (running statistics), as they are saved."""
        if self.runtime.world_size > 1:
            for buffer in self.buffers:
                dist.broadcast(buffer, src=0, group=self.runtime.group(Phase.STEP))

    @cached_property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that belong to the model's state; constants that it can make anew do not."""
        kept = self.module.state_dict(keep_vars=True)
        return [buffer for name, buffer in self.module.named_buffers() if name in kept]
