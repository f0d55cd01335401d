"""From ids to micro-batches: both loaders bring the same, from any step on, and evaluation sees each sample once."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch

from train.config import BatchConfig, DataConfig
from train.data import Batches, Order, evaluation_batches
from train.data.loading import GlobalBatchSampler, Window
from train.data.own import OwnSamples
from train.data.sources import Table

CPU = torch.device("cpu")
GATHER, LOADER = DataConfig(), DataConfig(loader="workers", workers=0)


class Squares:
    """Sample i is (i, i squared)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def gather(self, ids: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
        return ids, ids**2


class _Noisy:
    """A user's data set whose samples are random, by all generators that user code draws from."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, place: int) -> tuple[int, torch.Tensor]:
        return place, torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())])


class Noise(OwnSamples):
    def __init__(self, length: int) -> None:
        super().__init__(_Noisy())
        assert len(self) == length


def batches(
    data: DataConfig,
    rank: int = 0,
    world_size: int = 1,
    batch: BatchConfig | None = None,
    kind: type[Squares] | type[Noise] = Squares,
) -> Batches:
    order = Order(21, 8, seed=7)  # batches of 8, 8 and 5
    return Batches(kind(21), order, rank, world_size, batch or BatchConfig(8, micro_size=3), data, CPU)


def plain(windows: list[Window]) -> list[list[tuple[list[int], bool]]]:
    return [[(micro.tensors[0].tolist(), micro.is_padding) for micro in window] for window in windows]


@pytest.mark.parametrize("data", [GATHER, LOADER], ids=["gather", "loader"])
def test_windows_hold_the_global_batch_in_micro_batches(data: DataConfig) -> None:
    windows = list(batches(data).windows(0, 6))
    order = Order(21, 8, seed=7)
    assert [[s for ids, _ in window for s in ids] for window in plain(windows)] == [
        order.batch(index).tolist() for index in range(6)
    ]
    assert [[len(ids) for ids, _ in window] for window in plain(windows)] == [[3, 3, 2], [3, 3, 2], [3, 2]] * 2
    for window in windows:
        for micro in window:
            inputs, target = micro.tensors
            assert torch.equal(target, inputs * inputs)
            assert not micro.is_padding


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_the_loader_brings_what_gather_brings(world_size: int) -> None:
    for rank in range(world_size):
        expected = plain(list(batches(GATHER, rank, world_size).windows(0, 7)))
        assert plain(list(batches(LOADER, rank, world_size).windows(0, 7))) == expected


@pytest.mark.parametrize("data", [GATHER, LOADER], ids=["gather", "loader"])
def test_going_on_in_mid_epoch_brings_what_would_have_come(data: DataConfig) -> None:
    whole = plain(list(batches(data).windows(0, 8)))
    for first in range(8):
        assert plain(list(batches(data).windows(first, 8))) == whole[first:]


@pytest.mark.parametrize("data", [GATHER, LOADER], ids=["gather", "loader"])
def test_all_ranks_together_see_each_sample_once_an_epoch_not_counting_stand_ins(data: DataConfig) -> None:
    every = [plain(list(batches(data, rank, 6).windows(3, 6))) for rank in range(6)]
    seen = [s for rank in every for window in rank for ids, padding in window if not padding for s in ids]
    assert sorted(seen) == list(range(21))
    assert all(len({len(rank[step]) for rank in every}) == 1 for step in range(3))


@pytest.mark.parametrize("data", [GATHER, LOADER], ids=["gather", "loader"])
def test_an_empty_share_is_stood_in_for_by_a_sample_of_the_same_batch(data: DataConfig) -> None:
    last = plain(list(batches(data, 5, 6).windows(2, 3)))  # five samples for six ranks
    assert last == [[([int(Order(21, 8, seed=7).batch(2)[0])], True)]]
    first = plain(list(batches(data, 4, 6).windows(2, 3)))
    assert first == [[([int(Order(21, 8, seed=7).batch(2)[4])], False)]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process .* is multi-threaded")
def test_two_workers_bring_the_same_as_none() -> None:
    two = DataConfig(loader="workers", workers=2)
    plain_and_noise = [
        [[(m.tensors[0].tolist(), m.tensors[1].tolist()) for m in w] for w in batches(d, kind=Noise).windows(1, 5)]
        for d in (LOADER, two)
    ]
    assert plain_and_noise[0] == plain_and_noise[1]


@pytest.mark.parametrize("data", [GATHER, LOADER], ids=["gather", "loader"])
def test_what_is_random_in_a_sample_depends_on_the_sample_and_epoch_alone(data: DataConfig) -> None:
    def noise(first: int, stop: int, rank: int = 0, world_size: int = 1) -> dict[tuple[int, int], list[float]]:
        torch.rand(5)
        random.random()
        found = {}
        for step, window in enumerate(batches(data, rank, world_size, kind=Noise).windows(first, stop), first):
            for micro in window:
                for place, numbers in zip(micro.tensors[0].tolist(), micro.tensors[1].tolist(), strict=True):
                    found[step // 3, place] = numbers
        return found

    whole = noise(0, 6)
    assert len({tuple(numbers) for numbers in whole.values()}) == 42  # another in each sample and epoch
    assert noise(2, 4).items() <= whole.items()
    assert noise(0, 3, 1, 3).items() <= whole.items()


def test_the_sampler_knows_its_length_and_starts_where_it_is_told() -> None:
    sampler = GlobalBatchSampler(Order(21, 8, seed=7), 0, 1, BatchConfig(8, micro_size=3))
    assert len(sampler) == 8
    whole = list(sampler)
    assert sorted(chain(*whole)) == list(range(21))
    sampler.first = 2
    assert list(sampler) == whole[6:]
    sampler.first = 0
    sampler.set_epoch(1)
    assert sorted(chain(*sampler)) == list(range(21))
    assert list(sampler) != whole


@pytest.mark.parametrize(
    ("length", "world_size", "micro_size"), [(10, 1, 4), (10, 3, 2), (2, 4, 8), (1, 1, 1), (7, 7, 3)]
)
def test_evaluation_sees_each_sample_on_exactly_one_rank(length: int, world_size: int, micro_size: int) -> None:
    table = Table((torch.arange(length), torch.arange(length) * 2))
    ranks = [list(evaluation_batches(table, rank, world_size, micro_size, CPU)) for rank in range(world_size)]
    seen = [sample for rank in ranks for inputs, _ in rank for sample in inputs.tolist()]
    assert seen == list(range(length))
    assert all(1 <= len(inputs) <= micro_size for rank in ranks for inputs, _ in rank)
    shares = [sum(len(inputs) for inputs, _ in rank) for rank in ranks]
    assert max(shares) - min(shares) <= 1
