"""From sample ids to micro-batches on the device: by one indexing, or through a DataLoader with workers."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from train.config import BatchConfig, DataConfig
from train.data.order import Order, cut, micro_batches
from train.data.sources import Batch, Samples
from train.seeds import mix


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch of one rank."""

    tensors: Batch
    """Inputs of the model, then the target, on the device."""
    ids: torch.Tensor
    """Which samples these are, on the CPU."""
    is_padding: bool = False
    """The rank has no share of this one: a sample stands in, so that all ranks run the same collectives."""


Window = list[Micro]
"""All of a rank's micro-batches of one step."""


class Batches:
    """A rank's share of the global batches, in order, from any of them on."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        rank: int,
        world_size: int,
        batch: BatchConfig,
        data: DataConfig,
        device: torch.device,
    ) -> None:
        self._samples = samples
        self._device = device
        self._data = data
        self.sampler = GlobalBatchSampler(order, rank, world_size, batch)

    def windows(self, first: int, stop: int) -> Iterator[Window]:
        """This rank's window of each global batch from `first` to before `stop`."""
        windows = self._gathered(first, stop) if self._data.loader == "gather" else self._loaded(first, stop)
        return _ahead(windows, self._device) if self._device.type == "cuda" else windows

    def _gathered(self, first: int, stop: int) -> Iterator[Window]:
        order = self.sampler.order
        for index in range(first, stop):
            seed = mix(order.seed, index // order.batches_per_epoch)
            yield [Micro(self._samples.gather(ids, seed), ids, padding) for ids, padding in self.sampler.window(index)]

    def _loaded(self, first: int, stop: int) -> Iterator[Window]:
        """The tutorial's way: a DataLoader with workers, pinned memory, a sampler told the epoch."""
        sampler = self.sampler
        loader = DataLoader(
            _Fetched(self._samples, sampler.order.seed),
            batch_sampler=_WithEpoch(sampler),
            num_workers=self._data.workers,
            worker_init_fn=_leave_signals_to_the_rank,
            collate_fn=_as_fetched,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._data.workers > 0,
        )
        per_epoch = sampler.order.batches_per_epoch
        while first < stop:
            epoch, sampler.first = divmod(first, per_epoch)
            sampler.set_epoch(epoch)
            end = min(stop, (epoch + 1) * per_epoch)
            micros = iter(loader)
            for index in range(first, end):
                yield [Micro(next(micros), ids, padding) for ids, padding in sampler.window(index)]
            first = end


class GlobalBatchSampler(DistributedSampler[int]):
    """A DistributedSampler for whole micro-batches that neither pads nor drops: the rank's cut of each batch.

    torch's own repeats samples until all ranks have equally many, and deals them out one by one. Here every
    sample comes once an epoch, and the global batches do not depend on the number of ranks.
    """

    def __init__(self, order: Order, rank: int, world_size: int, batch: BatchConfig) -> None:
        super().__init__(range(order.length), num_replicas=world_size, rank=rank)  # type: ignore[arg-type]
        self.order = order
        self.batch = batch
        self.first = 0
        """Place in the epoch to start at, to go on in mid-epoch."""

    def window(self, index: int) -> list[tuple[torch.Tensor, bool]]:
        """(sample ids, whether they only stand in for an empty share) of each micro-batch of a global batch."""
        ids = self.order.batch(index)
        parts = micro_batches(
            ids,
            self.rank,
            self.num_replicas,
            micro_size=self.batch.micro_size,
            accumulation=self.batch.accumulation,
        )
        return [(part, False) if len(part) else (ids[:1], True) for part in parts]

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        """Lists of sample ids: this epoch's micro-batches of this rank, for a DataLoader's `batch_sampler`."""
        start = self.epoch * self.order.batches_per_epoch
        for index in range(start + self.first, start + self.order.batches_per_epoch):
            for part, _ in self.window(index):
                yield part.tolist()

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return sum(1 for _ in self)


class _WithEpoch:
    """A sampler's micro-batches with the epoch before the ids: workers are told nothing else."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for ids in self._sampler:
            yield [self._sampler.epoch, *ids]

    def __len__(self) -> int:
        return len(self._sampler)


class _Fetched(Dataset[Batch]):
    """Whole batches for DataLoader workers: the ones that `gather` gives in the training process."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed

    def __getitems__(self, epoch_and_ids: list[int]) -> Batch:
        epoch, *ids = epoch_and_ids
        return self._samples.gather(torch.tensor(ids), mix(self._seed, epoch))


def _leave_signals_to_the_rank(worker: int) -> None:
    """A stop request to the whole process group must not kill the workers of the step that is still to be finished."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _as_fetched(batch: Any) -> Any:
    return batch


def _ahead(windows: Iterable[Window], device: torch.device) -> Iterator[Window]:
    """Copy each window to the GPU on a stream of its own while the one before is computed."""
    stream = torch.cuda.Stream(device)

    def copy(window: Window) -> tuple[Window, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copies = [
                replace(micro, tensors=tuple(_pinned(t).to(device, non_blocking=True) for t in micro.tensors))
                for micro in window
            ]
            return copies, stream.record_event()

    def arrived(window: Window, copied: torch.cuda.Event) -> Window:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)  # of this window only: the next one's copy goes on beside
        for micro in window:
            for tensor in micro.tensors:
                tensor.record_stream(current)  # else its memory could be reused while `current` still reads it
        return window

    waiting: tuple[Window, torch.cuda.Event] | None = None
    for window in windows:
        ready, waiting = waiting, copy(window)
        if ready is not None:
            yield arrived(*ready)
    if waiting is not None:
        yield arrived(*waiting)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def evaluation_batches(
    samples: Samples, rank: int, world_size: int, micro_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's part of a set, each sample on exactly one rank and once; a rank may get none."""
    mine = cut(torch.arange(len(samples)), world_size)[rank]
    for ids in mine.split(micro_size) if len(mine) else ():
        yield tuple(tensor.to(device) for tensor in samples.gather(ids))
