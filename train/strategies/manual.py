"""DistributedDataParallel by hand: the same weights everywhere, then an all-reduce of the gradients in buckets.

The reference to read. It sends only after backward has ended; ddp sends while it runs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from train.config import StrategyConfig
from train.runtime import Runtime
from train.seam import Phase
from train.strategies.base import Strategy


class Manual(Strategy):
    """What ddp does, in forty lines."""

    needs_group: ClassVar[bool] = True

    def __init__(self, config: StrategyConfig, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.group = runtime.group(Phase.STEP)

    def wrap(self, objective: nn.Module) -> None:
        """Rank 0's weights to all ranks; then plan the buckets."""
        self.module = objective
        for tensor in [*objective.parameters(), *objective.buffers()]:
            first = tensor.detach().contiguous()
            dist.broadcast(first, src=0, group=self.group)
            tensor.detach().copy_(first)
        self.buckets = _buckets([p for p in objective.parameters() if p.requires_grad], self.config.bucket_mb)

    def reduce_gradients(self) -> None:
        """Send every bucket, then wait for each and hand its pieces back."""
        sent = []
        for bucket in self.buckets:
            # A parameter that this rank did not use still takes part: another rank may have used it. How many did
            # travels along, for a parameter that nobody used has no gradient, which is not the same as a zero one.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            users = torch.tensor([float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype)
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), users.to(bucket[0].device)])
            work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
            sent.append((bucket, gradients, flat, work))
        for bucket, gradients, flat, work in sent:
            work.wait()
            *pieces, users = flat.split([*(p.numel() for p in bucket), len(bucket)])
            # On a GPU the host waits here, once a bucket; ddp has better ways. This one is to be read.
            for parameter, gradient, piece, used in zip(bucket, gradients, pieces, users.tolist(), strict=True):
                # Into the gradient as it lies in memory: one that is not row by row stays so.
                parameter.grad = gradient.copy_(piece.view_as(parameter)) if used else None


def _buckets(parameters: list[nn.Parameter], size_mb: float) -> list[list[nn.Parameter]]:
    """Parameters in reverse order (as backward makes gradients), cut where a bucket is full or the type changes."""
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            room = size_mb * 2**20
        buckets[-1].append(parameter)
        room -= size
    return buckets
