"""Rank 0's state reaches the ranks that have no file."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch

from tests.states import same, state_at
from train.checkpoint import State
from train.runtime import Runtime
from train.sharing import share


class Rank:
    """A runtime that plays rank 0's broadcasts back to another rank of the same process."""

    def __init__(self, rank: int, wire: list[Any], world_size: int = 2) -> None:
        self.rank, self.wire, self.world_size = rank, wire, world_size

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self.wire.append(value)
            return value
        return self.wire.pop(0)

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self.wire.append(tensor.clone())
        else:
            tensor.copy_(self.wire.pop(0))


def shared(state: State | None) -> tuple[State | None, State | None, list[Any]]:
    wire: list[Any] = []
    mine = share(state, cast(Runtime, Rank(0, wire)))
    sent = list(wire)
    theirs = share(None, cast(Runtime, Rank(1, wire)))
    assert wire == []
    return mine, theirs, sent


def test_rank_0s_state_reaches_the_others() -> None:
    state: State = {
        **state_at(4), "flat": torch.arange(6.0).reshape(2, 3).t(), "scalar": torch.tensor(7, dtype=torch.int64),
        "short": torch.ones(2, dtype=torch.bfloat16), "bits": torch.tensor([True, False]), "pair": (1, torch.ones(1)),
        "empty": torch.empty(0, 3), "number": 3, "nothing": None,
    }  # fmt: skip
    mine, theirs, sent = shared(state)
    assert same(mine, state)
    assert same(theirs, state)
    assert not any(isinstance(value, torch.Tensor) for value in sent[0].values())


def test_a_state_of_no_tensors_and_no_state_at_all_are_shared_too() -> None:
    assert shared({"step": 3})[:2] == ({"step": 3}, {"step": 3})
    assert shared(None) == (None, None, [None])


def test_a_lone_rank_keeps_its_state_as_it_is() -> None:
    state: State = OrderedDict(weight=torch.ones(2))
    assert share(state, cast(Runtime, Rank(0, [], world_size=1))) is state
