"""Which samples make which global batch, and which rank takes which of them: index arithmetic alone.

The order is a function of (seed, epoch, global batch index). The number of ranks only decides how a global
batch is cut, so any world size sees the same global batches, and to resume is to start at another index.
"""

from __future__ import annotations

import math

import torch


class Order:
    """The endless sequence of global batches of a data set."""

    def __init__(self, length: int, global_size: int, *, seed: int, drop_last: bool = False) -> None:
        """
        Args:
            length: number of samples.
            global_size: samples a step; an epoch's last batch holds what is left.
            seed: fixes the shuffle.
            drop_last: leave an epoch's smaller last batch out.
        """
        self.length = length
        self.global_size = min(global_size, length) if drop_last else global_size
        self.seed = seed
        rounded = length // self.global_size if drop_last else math.ceil(length / self.global_size)
        self.batches_per_epoch = rounded
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    def size(self, index: int) -> int:
        """Samples of global batch `index`."""
        start = index % self.batches_per_epoch * self.global_size
        return min(self.global_size, self.length - start)

    def batch(self, index: int) -> torch.Tensor:
        """Sample ids of global batch `index`, counted from 0 over all epochs: int64 [at most global_size]."""
        epoch, place = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shuffled = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return self._shuffled[place * self.global_size : (place + 1) * self.global_size]


def cut(ids: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut into `parts` runs whose lengths differ by at most one, longer ones first; some may be empty."""
    return list(torch.tensor_split(ids, parts))


def micro_batches(
    ids: torch.Tensor, rank: int, world_size: int, *, micro_size: int | None, accumulation: int | None
) -> list[torch.Tensor]:
    """This rank's micro-batches of one global batch. Every rank gets equally many; some may be empty.

    Args:
        ids: the global batch's sample ids.
        rank: whose share.
        world_size: number of ranks.
        micro_size: most samples a micro-batch; decides the number where `accumulation` does not.
        accumulation: number of micro-batches of a full batch; a partial batch has no more than it can fill.
    """
    largest_share = math.ceil(len(ids) / world_size)
    count = accumulation or math.ceil(largest_share / (micro_size or largest_share))
    return cut(cut(ids, world_size)[rank], min(count, largest_share))
