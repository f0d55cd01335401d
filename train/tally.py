"""One step's sums over all ranks, carried by one small all-reduce that overlaps the last backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.runtime import Runtime
from train.seam import Phase


@dataclass(frozen=True)
class Totals:
    """What all ranks know of a step."""

    loss_sum: float
    count: float
    stops: float
    """How many ranks were asked to stop."""

    @property
    def loss(self) -> float:
        """Mean over the global batch's items."""
        return self.loss_sum / self.count if self.count else float("nan")


class Tally:
    """Started before the last backward; the count is needed after it, the rest is read one step later.

    Reading later keeps the host ahead of the GPU: no step waits for a number that only a log wants.
    """

    def __init__(self, runtime: Runtime, step: int, loss_sum: torch.Tensor, count: torch.Tensor, stop: bool) -> None:
        """
        Args:
            runtime: this rank's ties.
            step: counted from 1.
            loss_sum: sum of this rank's losses, a scalar on its device.
            count: this rank's items, a scalar.
            stop: this rank was asked to stop.
        """
        self.step = step
        self.local_loss_sum = loss_sum
        self._sums = torch.stack(
            (loss_sum.detach().double(), count.double(), torch.full_like(count, stop, dtype=torch.float64))
        )
        group = runtime.group(Phase.STEP)
        alone = runtime.world_size == 1
        self._work = None if alone else dist.all_reduce(self._sums, group=group, async_op=True)
        self._on_host = self._sums
        self._copied: torch.cuda.Event | None = None

    def count(self) -> torch.Tensor:
        """Items of the global batch: a scalar on the device (float64)."""
        if self._work is not None:
            self._work.wait()  # on CUDA this makes the stream wait, not the host
            self._work = None
        if self._sums.is_cuda and self._copied is None:
            self._on_host = torch.empty(3, dtype=torch.float64, pin_memory=True)
            self._on_host.copy_(self._sums, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._sums[1]

    def read(self) -> Totals:
        """The sums on the host; waits for this step's end on the GPU, not for later steps."""
        self.count()
        if self._copied is not None:
            self._copied.synchronize()
        return Totals(*self._on_host.tolist())
