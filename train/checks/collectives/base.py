"""What an operation is: the tensors that go in, the call, and what must come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """This rank in a group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device


@dataclass
class Buffers:
    """What goes out and what comes in; one and the same tensor where the call works in place."""

    out: torch.Tensor
    into: torch.Tensor


class Operation(ABC):
    """One operation. `count` is the number of elements of one rank's part."""

    name: ClassVar[str]
    in_parts: ClassVar[bool] = False
    """Whether its size is that of all ranks' parts together, by nccl-tests' definition."""
    least_ranks: ClassVar[int] = 1
    has_data: ClassVar[bool] = True

    @staticmethod
    def bus_factor(size: int) -> float:
        """Bus bandwidth over algorithmic bandwidth (nccl-tests, PERFORMANCE.md, and its gather.cu, scatter.cu)."""
        return 1.0

    @abstractmethod
    def buffers(self, at: Place, dtype: torch.dtype, count: int) -> Buffers:
        """Filled, for one call."""

    @abstractmethod
    def call(self, with_: Buffers, at: Place) -> None:
        """The operation itself; this rank's work is done, or queued on the GPU, when it returns."""

    @abstractmethod
    def expected(self, at: Place, dtype: torch.dtype, count: int) -> torch.Tensor | None:
        """What must be in `into` afterwards; None where this rank gets nothing."""

    def prove(self, with_: Buffers, at: Place) -> None:
        """The call whose result is looked at."""
        self.call(with_, at)


def synchronise(at: Place) -> None:
    """Wait for what is queued on the GPU."""
    if at.device.type == "cuda":
        torch.cuda.synchronize(at.device)
