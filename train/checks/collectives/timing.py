"""How long operations take, and what that is in bandwidth, by the definitions of nccl-tests (doc/PERFORMANCE.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.checks.collectives.base import Buffers, Operation, Place, synchronise
from train.checks.collectives.correctness import difference
from train.checks.collectives.values import DTYPES

_MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """One operation at one size: the slowest rank's time."""

    operation: str
    size_bytes: int
    """As nccl-tests counts it: a rank's tensor, or all parts together where the operation has parts."""
    calls: int
    """Over which the time is a mean; 0: not measured, for want of time."""
    time_s: float
    ranks: int
    bus_factor: float
    problem: str = ""
    """What was wrong with the result of the first call, on this rank."""

    @property
    def algorithm_gb_s(self) -> float:
        """Size over time, in 10^9 bytes a second."""
        return self.size_bytes / self.time_s / 1e9 if self.calls else 0.0

    @property
    def bus_gb_s(self) -> float:
        """What the busiest link has carried: comparable with its data sheet, for any number of ranks."""
        return self.algorithm_gb_s * self.bus_factor


def sizes_between(low: int, high: int, factor: int) -> list[int]:
    """`low`, `low · factor`, … up to `high`."""
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return sizes


def measure_all(
    operations: Sequence[Operation],
    at: Place,
    dtype: str,
    sizes: Sequence[int],
    seconds: float,
    most: Callable[[float], float],
) -> Iterator[Timing]:
    """Each operation at each size, in about so many seconds together.

    Args:
        operations: what to measure; a barrier is measured once, without a size.
        at: this rank's place.
        dtype: of the tensors.
        sizes: bytes, as nccl-tests counts them, rising.
        seconds: for everything. What would not fit is told with 0 calls.
        most: the largest of all ranks' numbers, so that all decide alike.
    """
    began_s = time.perf_counter()
    for number, operation in enumerate(operations, 1):
        until_s = began_s + seconds * number / len(operations)
        mine = sizes if operation.has_data else [0]
        rate = 0.0  # bytes a second, the best so far
        for left, size in zip(range(len(mine), 0, -1), mine, strict=True):
            room_s = max(seconds / len(operations) / len(mine), until_s - time.perf_counter())
            needed_s = 3 * size / rate if rate else 0.0  # two calls before the one that counts
            if most(needed_s - room_s) > 0:  # all decide alike: by the rank that has the least room
                yield Timing(operation.name, size, 0, 0.0, at.size, operation.bus_factor(at.size))
                continue
            found = measure(operation, at, dtype, size, room_s / left / 2, most)
            rate = max(rate, found.size_bytes / found.time_s)
            yield found


def measure(
    operation: Operation, at: Place, dtype: str, size_bytes: int, seconds: float, most: Callable[[float], float]
) -> Timing:
    """One call that is looked at, one to guess by, then as many as go into the time; all ranks begin together."""
    parts = at.size if operation.in_parts else 1
    count = max(1, size_bytes // DTYPES[dtype].itemsize // parts)
    buffers = operation.buffers(at, DTYPES[dtype], count)
    operation.call(buffers, at)
    synchronise(at)
    problem = "" if not operation.has_data else difference(operation, buffers, at, dtype, count)
    buffers.out.zero_()  # a sum in place would grow with each call
    buffers.into.zero_()
    once_s = most(_seconds(operation, buffers, at, 1))
    calls = int(most(max(1, min(_MOST_CALLS, seconds // max(once_s, 1e-9)))))
    mean_s = most(_seconds(operation, buffers, at, calls) / calls)
    real = count * parts * DTYPES[dtype].itemsize if operation.has_data else 0
    return Timing(operation.name, real, calls, mean_s, at.size, operation.bus_factor(at.size), problem)


def _seconds(operation: Operation, buffers: Buffers, at: Place, calls: int) -> float:
    dist.barrier(group=at.group)
    synchronise(at)
    began_s = time.perf_counter()
    for _ in range(calls):
        operation.call(buffers, at)
    synchronise(at)
    return time.perf_counter() - began_s


def agree_on_most(group: dist.ProcessGroup | None) -> Callable[[float], float]:
    """The largest of all ranks' numbers, over a group that takes tensors on the CPU."""

    def most(mine: float) -> float:
        box = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
        return float(box)

    return most
