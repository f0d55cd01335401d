"""SGD takes gradients as they are: a wrong factor, a lost one, or one too many moves the weights elsewhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import Flags, config_of, make_job, train_all, weights
from tests.ranks import run_ranks
from train import loop
from train.data import Order
from train.models import Objective, default_loss
from train.state import Job
from train.strategies import make_strategy

MODULE = "tests.distributed.test_gradient_scale"
SGD = ("optim.name=sgd", "optim.weight_decay=0", "optim.schedule=constant", "optim.warmup_steps=0")
MLP = (*SGD, "model.name=mlp", "data.name=classification", "data.size=200", "batch.global_size=16")
DDP, MANUAL = "strategy.name=ddp", "strategy.name=manual"
SEED, SIZE, BATCH, MASKED = 1337, 24, 4, 2


def _start(job: Job) -> torch.Tensor:
    return weights(job).clone()


def _moved_alike(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """How far apart two runs ended, as a share of how far the second one went."""
    way = float((other - start).norm())
    assert way > 0.05, "too short a way to compare"
    return float((one - other).norm()) / way


# fp16's scaler and clipping.


def test_fp16_clips_gradients_of_their_own_size() -> None:
    """A tiny clip_norm decides the length of each step: clipped while scaled, they would be a thousandth of it."""
    ends = {}
    for precision in ("fp32", "fp16"):
        job = make_job(
            config_of(*MLP, f"precision.name={precision}", "precision.initial_scale=1024", "optim.clip_norm=0.001",
                      "optim.lr=100", "train.steps=3")
        )  # fmt: skip
        start = _start(job)
        loop.fit(job)
        assert job.progress.updates == 3
        ends[precision] = weights(job)
    assert float((ends["fp32"] - start).norm()) <= 3 * 100 * 0.001 * 1.001  # each step was clipped
    assert _moved_alike(ends["fp16"], ends["fp32"], start) < 0.01


# Gradients compressed on the wire.


def test_compressed_gradients_move_weights_as_far_as_plain_ones() -> None:
    """A sum in place of the average over two ranks would go twice as far."""
    hooks: dict[str, Flags] = {
        hook: [*MLP, DDP, f"strategy.comm_hook={hook}", "optim.clip_norm=0", "optim.lr=0.1", "train.steps=5"]
        for hook in ("none", "fp16", "bf16")
    }
    start = _start(make_job(config_of(*MLP)))
    for ends in run_ranks(2, train_all, hooks):
        assert _moved_alike(ends["fp16"], ends["none"], start) < 0.001
        assert _moved_alike(ends["bf16"], ends["none"], start) < 0.01


# Parameters that not every step, or not every rank, uses.


class Branches(nn.Module):
    """One layer for all samples, one for those whose first number is 1, one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 3)
        self.seldom = nn.Linear(5, 3)
        self.never = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flagged = x[:, :1] == 1
        output: torch.Tensor = self.trunk(x)
        return output + self.seldom(x) * flagged if bool(flagged.any()) else output


def branches() -> nn.Module:
    return Branches()


def flagged_data() -> tuple[TensorDataset, TensorDataset]:
    """Of the global batches of 4 the first has no flagged sample, the second has one, the third three."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE, 5, generator=generator)
    inputs[:, 0] = 0
    order = Order(SIZE, BATCH, seed=SEED)
    inputs[order.batch(1)[:1], 0] = 1
    inputs[order.batch(2)[1:], 0] = 1
    labels = torch.randint(3, (SIZE,), generator=generator)
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


BRANCHES = (
    f"model.name={MODULE}:branches", f"data.name={MODULE}:flagged_data", f"batch.global_size={BATCH}",
    "precision.name=fp64", "optim.warmup_steps=0", "optim.lr=0.05", f"train.seed={SEED}",
)  # fmt: skip


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_that_no_rank_or_one_rank_used_move_as_in_one_process(optimizer: str) -> None:
    """Weights decay, so that a gradient of zeros and none at all are not the same: none leaves them alone."""
    flags = [*BRANCHES, f"optim.name={optimizer}", "optim.weight_decay=0.5", "train.steps=9"]
    job = make_job(config_of(*flags))
    model = job.objective.model
    assert isinstance(model, Branches)
    never = model.never.weight.detach().clone()
    start = _start(job)
    assert loop.fit(job)
    assert torch.equal(model.never.weight, never)
    ways: dict[str, Flags] = {
        "ddp": [*flags, DDP, "strategy.find_unused_parameters=true"],
        "ddp, no views": [
            *flags, DDP, "strategy.find_unused_parameters=true", "strategy.gradient_as_bucket_view=false",
        ],
        "manual": [*flags, MANUAL],
        "manual, small buckets": [*flags, MANUAL, "strategy.bucket_mb=0.0001"],
    }  # fmt: skip
    assert not torch.equal(weights(job), start)
    for rank, ends in enumerate(run_ranks(2, train_all, ways)):
        for way, theirs in ends.items():
            assert float((theirs - weights(job)).abs().max()) < 1e-10, f"{way}, rank {rank}"


# Ranks that start unequal.


def _wrap_unequal(strategies: list[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and buffers of a model that differs by rank, before and after it is wrapped."""
    found = {}
    for name in strategies:
        job = make_job(config_of(*MLP, f"strategy.name={name}", world_size=2))
        torch.manual_seed(10 + job.runtime.rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].weight = nn.Parameter(torch.randn(3, 4).t())  # not row by row
        model.get_buffer("1.running_mean").normal_()

        def state(model: nn.Module = model) -> torch.Tensor:
            return torch.cat([tensor.detach().reshape(-1).double() for tensor in model.state_dict().values()])

        before = state()
        make_strategy(job.config.strategy, job.runtime).wrap(Objective(model, default_loss))
        found[name] = before, state()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "manual"])
def test_all_ranks_start_from_rank_0s_weights(strategy: str) -> None:
    first, second = (theirs[strategy] for theirs in run_ranks(2, _wrap_unequal, [strategy]))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], first[0])
    assert torch.equal(second[1], first[0])


# A parameter that does not lie row by row in memory.


class Turned(nn.Module):
    """A linear layer whose matrix lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4).t())
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(nn.functional.linear(x, self.weight)))  # type: ignore[no-any-return]


def turned() -> nn.Module:
    return Turned()


def pairs() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SIZE, 2, generator=generator)
    labels = torch.randint(3, (SIZE,), generator=generator)
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_parameter_that_lies_column_by_column_trains_alike(optimizer: str) -> None:
    flags = [
        f"model.name={MODULE}:turned", f"data.name={MODULE}:pairs", "precision.name=fp64", "batch.global_size=6",
        f"optim.name={optimizer}", "optim.lr=0.05", "optim.warmup_steps=0", "train.steps=6",
    ]  # fmt: skip
    job = make_job(config_of(*flags))
    model = job.objective.model
    assert isinstance(model, Turned)
    assert not model.weight.is_contiguous()
    assert loop.fit(job)
    for ends in run_ranks(2, train_all, {"ddp": [*flags, DDP], "manual": [*flags, MANUAL]}):
        for theirs in ends.values():
            torch.testing.assert_close(theirs, weights(job), rtol=0, atol=1e-10)


# A global batch in which no target counts.


def masked_data() -> tuple[TensorDataset, TensorDataset]:
    """Every target of the third global batch is -100."""
    train, val = pairs()
    inputs, labels = train.tensors
    labels[Order(SIZE, BATCH, seed=SEED).batch(MASKED)] = -100
    return TensorDataset(inputs, labels), val


def _train_masked(strategy: str, clip_norm: float, world_size: int) -> list[torch.Tensor]:
    """The weights at the start and after each of four steps; the third one has no items."""
    job = make_job(
        config_of(*SGD, f"model.name={MODULE}:turned", f"data.name={MODULE}:masked_data", f"train.seed={SEED}",
                  f"batch.global_size={BATCH}", f"strategy.name={strategy}", f"optim.clip_norm={clip_norm}",
                  "optim.lr=0.1", "train.steps=4", "train.log_every=1", world_size=world_size)
    )  # fmt: skip
    seen = [_start(job)]
    job.optimizer.register_step_post_hook(lambda *_: seen.append(_start(job)))
    assert loop.fit(job)
    assert job.progress.items == 3 * BATCH
    return seen


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize(("strategy", "world_size"), [("baseline", 1), ("ddp", 2), ("manual", 2)])
def test_a_batch_without_items_changes_nothing(strategy: str, world_size: int, clip_norm: float) -> None:
    if world_size == 1:
        by_rank = [_train_masked(strategy, clip_norm, world_size)]
    else:
        by_rank = run_ranks(world_size, _train_masked, strategy, clip_norm, world_size)
    for seen in by_rank:
        assert all(bool(torch.isfinite(vector).all()) for vector in seen)
        same = [torch.equal(before, after) for before, after in pairwise(seen)]
        assert same == [False, False, True, False]
