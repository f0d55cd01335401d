"""What dp does with the GPUs that are there, tried where there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from train.config import StrategyConfig
from train.runtime import Runtime
from train.strategies import DataParallel

CUDA = torch.device("cuda", 0)


class Wrapped(nn.Module):
    """In place of `nn.DataParallel`: what it was called with."""

    def __init__(self, module: nn.Module, **named: Any) -> None:
        super().__init__()
        self.module = module
        self.named = named


def wrap(monkeypatch: pytest.MonkeyPatch, gpus: int, device: torch.device) -> tuple[nn.Module, DataParallel]:
    """An objective, and dp around it on a host with that many GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(nn, "DataParallel", Wrapped)
    strategy = DataParallel(StrategyConfig(name="dp"), cast(Runtime, SimpleNamespace(device=device)))
    objective = nn.Linear(2, 2)
    strategy.wrap(objective)
    return objective, strategy


def test_a_batch_is_split_over_all_gpus_and_gathered_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, strategy = wrap(monkeypatch, 3, CUDA)
    assert isinstance(strategy.module, Wrapped)
    assert strategy.module.module is objective
    assert strategy.module.named == {"device_ids": [0, 1, 2], "output_device": 0}
    assert strategy.note is None


def test_one_gpu_is_nothing_to_split_over_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, strategy = wrap(monkeypatch, 1, CUDA)
    assert strategy.module is objective
    assert strategy.note is not None
    assert "one GPU" in strategy.note
    assert "cuda:0 alone" in strategy.note


@pytest.mark.parametrize("gpus", [0, 3], ids=["none there", "three there, but cpu asked for"])
def test_on_the_cpu_there_is_nothing_to_split_over_and_said_so(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, strategy = wrap(monkeypatch, gpus, torch.device("cpu"))
    assert strategy.module is objective
    assert strategy.note is not None
    assert "no GPU" in strategy.note
    assert "cpu alone" in strategy.note
