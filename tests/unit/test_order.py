"""Which rank sees which sample: every sample once an epoch, and the same global batches for any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import Order
from train.data.order import cut, micro_batches

QUICK = settings(max_examples=40, deadline=None, database=None)
LENGTHS, SIZES, WORLDS = st.integers(1, 200), st.integers(1, 70), st.integers(1, 9)


def epoch_of(order: Order, epoch: int) -> list[list[int]]:
    start = epoch * order.batches_per_epoch
    return [order.batch(index).tolist() for index in range(start, start + order.batches_per_epoch)]


@QUICK
@given(LENGTHS, SIZES, st.integers(0, 2**31 - 1), st.integers(0, 3))
def test_each_sample_comes_exactly_once_an_epoch(length: int, size: int, seed: int, epoch: int) -> None:
    batches = epoch_of(Order(length, size, seed=seed), epoch)
    assert sorted(sample for batch in batches for sample in batch) == list(range(length))
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size


@QUICK
@given(LENGTHS, SIZES, st.integers(0, 100))
def test_dropping_the_last_batch_leaves_whole_ones_without_repeats(length: int, size: int, seed: int) -> None:
    batches = epoch_of(Order(length, size, seed=seed, drop_last=True), 1)
    seen = [sample for batch in batches for sample in batch]
    assert {len(batch) for batch in batches} == {min(size, length)}
    assert len(set(seen)) == len(seen)
    assert length - len(seen) < min(size, length)


@QUICK
@given(LENGTHS, SIZES, st.booleans(), st.integers(0, 500))
def test_the_told_size_of_a_batch_is_its_length(length: int, size: int, drop_last: bool, index: int) -> None:
    order = Order(length, size, seed=3, drop_last=drop_last)
    assert order.size(index) == len(order.batch(index))


@QUICK
@given(LENGTHS, SIZES, st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_a_batch_is_a_function_of_its_index_alone(length: int, size: int, indices: list[int]) -> None:
    used = Order(length, size, seed=11)
    for index in indices:
        assert torch.equal(used.batch(index), Order(length, size, seed=11).batch(index))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    order = Order(50, 50, seed=1)
    orders = [order.batch(0), order.batch(1), order.batch(2), Order(50, 50, seed=2).batch(0)]
    assert len({tuple(ids.tolist()) for ids in orders}) == 4
    assert order.batch(0).tolist() != list(range(50))


def test_sixteen_a_step_of_ninety_seven_end_with_a_batch_of_one() -> None:
    order = Order(97, 16, seed=0)
    assert order.batches_per_epoch == 7
    assert [order.size(index) for index in range(8)] == [16, 16, 16, 16, 16, 16, 1, 16]
    assert Order(97, 16, seed=0, drop_last=True).batches_per_epoch == 6


@QUICK
@given(st.integers(0, 100), st.integers(1, 12))
def test_cuts_differ_by_at_most_one_and_keep_the_order(length: int, parts: int) -> None:
    pieces = [piece.tolist() for piece in cut(torch.arange(length), parts)]
    assert [sample for piece in pieces for sample in piece] == list(range(length))
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def shares(
    ids: torch.Tensor, world_size: int, micro_size: int | None, accumulation: int | None
) -> list[list[list[int]]]:
    return [
        [
            part.tolist()
            for part in micro_batches(ids, rank, world_size, micro_size=micro_size, accumulation=accumulation)
        ]
        for rank in range(world_size)
    ]


MICRO = st.one_of(st.none(), st.integers(1, 20))


@QUICK
@given(LENGTHS, SIZES, st.integers(0, 40), MICRO, MICRO)
def test_every_world_size_sees_the_same_global_batch(
    length: int, size: int, index: int, micro_size: int | None, accumulation: int | None
) -> None:
    ids = Order(length, size, seed=5).batch(index)
    for world_size in range(1, 7):
        seen = [
            sample for rank in shares(ids, world_size, micro_size, accumulation) for part in rank for sample in part
        ]
        assert seen == ids.tolist()


@QUICK
@given(SIZES, WORLDS, MICRO, MICRO)
def test_ranks_have_equally_many_micro_batches_of_nearly_equal_size(
    size: int, world_size: int, micro_size: int | None, accumulation: int | None
) -> None:
    ranks = shares(torch.arange(size), world_size, micro_size, accumulation)
    assert len({len(parts) for parts in ranks}) == 1
    assert len(ranks[0]) >= 1
    whole = [sum(map(len, parts)) for parts in ranks]
    assert max(whole) - min(whole) <= 1
    for parts in ranks:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@QUICK
@given(SIZES, WORLDS, st.integers(1, 20))
def test_micro_batches_hold_no_more_than_allowed_and_are_as_few_as_can_be(size: int, world: int, most: int) -> None:
    ranks = shares(torch.arange(size), world, most, None)
    assert max(len(part) for parts in ranks for part in parts) <= most
    busiest = max(sum(map(len, parts)) for parts in ranks)
    assert (len(ranks[0]) - 1) * most < busiest  # one less would not have room


@QUICK
@given(SIZES, WORLDS, st.integers(1, 20))
def test_accumulation_is_kept_as_far_as_the_batch_can_fill_it(size: int, world_size: int, accumulation: int) -> None:
    ranks = shares(torch.arange(size), world_size, None, accumulation)
    largest = math.ceil(size / world_size)
    assert len(ranks[0]) == min(accumulation, largest)
    assert all(len(part) > 0 for part in ranks[0])  # the first rank has no empty one


@pytest.mark.parametrize(
    ("world_size", "micro_size", "accumulation", "expected"),
    [
        (1, None, None, [[[0, 1, 2, 3, 4, 5, 6]]]),
        (2, None, None, [[[0, 1, 2, 3]], [[4, 5, 6]]]),
        (2, 3, None, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
        (3, None, 2, [[[0, 1], [2]], [[3], [4]], [[5], [6]]]),
        (4, 1, None, [[[0], [1]], [[2], [3]], [[4], [5]], [[6], []]]),
        (8, None, None, [[[0]], [[1]], [[2]], [[3]], [[4]], [[5]], [[6]], [[]]]),
    ],
)
def test_seven_samples_by_hand(
    world_size: int, micro_size: int | None, accumulation: int | None, expected: list[list[list[int]]]
) -> None:
    assert shares(torch.arange(7), world_size, micro_size, accumulation) == expected
