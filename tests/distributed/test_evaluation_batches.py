"""Evaluation takes no more memory than training, and outputs of any kind where the loss is the user's own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import Flags, config_of, make_job
from tests.ranks import run_ranks
from train import loop
from train.state import Evaluation

MODULE = "tests.distributed.test_evaluation_batches"
Kind = Literal["plain", "pair", "dictionary", "image"]


class Recording(nn.Module):
    """A linear layer that remembers how many samples it was given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.sizes: dict[bool, list[int]] = {True: [], False: []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes[self.training].append(len(x))
        return self.layer(x)  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


class Dictionary(Pair):
    """Two heads by name."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"one": self.one(x), "other": self.other(x)}


def model(kind: Kind) -> nn.Module:
    if kind == "image":
        return nn.Conv2d(2, 3, 1)  # [N, 2, H, W] to [N, 3, H, W]
    return {"plain": Recording, "pair": Pair, "dictionary": Dictionary}[kind]()


def data(kind: Kind) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(6)
    shape = (90, 2, 4, 5) if kind == "image" else (90, 4)
    inputs = torch.randn(shape, generator=generator)
    labels = torch.randint(3, (90, 4, 5) if kind == "image" else (90,), generator=generator)
    return TensorDataset(inputs[:48], labels[:48]), TensorDataset(inputs[48:], labels[48:])


def pair_loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return sum((F.cross_entropy(head, target, reduction="none") for head in output), torch.zeros(()))


def dictionary_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return pair_loss((output["one"], output["other"]), target)


def image_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _flags(kind: Kind, *more: str) -> Flags:
    return (
        f"model.name={MODULE}:model", f"model.args={{kind: {kind}}}", f"data.name={MODULE}:data",
        f"data.args={{kind: {kind}}}", "train.steps=3", "batch.global_size=16", *more,
    )  # fmt: skip


def _sizes(cases: list[Flags], world_size: int) -> list[dict[bool, list[int]]]:
    """How many samples the model was given at once, in training (True) and in evaluation (False)."""
    found = []
    for flags in cases:
        name = "ddp" if world_size > 1 else "baseline"
        job = make_job(config_of(*_flags("plain", *flags), f"strategy.name={name}", world_size=world_size))
        loop.fit(job)
        assert isinstance(job.objective.model, Recording)
        found.append(job.objective.model.sizes)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_holds_no_more_samples_at_once_than_training(world_size: int) -> None:
    cases: dict[Flags, int] = {
        (): 16 // world_size,
        ("batch.accumulation=4",): 4 // world_size,
        ("batch.accumulation=8",): 2 // world_size,
        ("batch.micro_size=3",): 3,
    }
    by_rank = [_sizes(list(cases), 1)] if world_size == 1 else run_ranks(world_size, _sizes, list(cases), world_size)
    for found in by_rank:
        for (flags, most), sizes in zip(cases.items(), found, strict=True):
            assert max(sizes[True]) == most, flags
            assert max(sizes[False]) <= most, flags
            assert sum(sizes[False]) == 42 // world_size, flags


def _evaluated(kind: Kind) -> Evaluation:
    job = make_job(config_of(*_flags(kind, f"model.loss={MODULE}:{kind}_loss", "batch.micro_size=5")))
    assert loop.fit(job)
    found = job.progress.evaluation
    assert found is not None
    inputs, labels = data(kind)[1].tensors
    with torch.no_grad():
        losses = job.objective.loss(job.objective.model(inputs), labels)
    assert isinstance(losses, torch.Tensor)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    return found


@pytest.mark.parametrize("kind", ["pair", "dictionary"])
def test_outputs_that_are_no_tensor_are_evaluated_by_their_own_loss_alone(kind: Kind) -> None:
    found = _evaluated(kind)
    assert (found.accuracy, found.samples) == (None, 42)


def test_outputs_with_classes_in_the_second_place_are_evaluated_by_their_own_loss_alone() -> None:
    found = _evaluated("image")
    assert (found.accuracy, found.samples) == (None, 42)
