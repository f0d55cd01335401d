"""What is compared: a small job, and the ways to train it that must all be the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from train.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    StrategyConfig,
    TrainConfig,
)

STEPS = 20
EXACT = 1e-10
"""Largest |Δ| in float64, in the gradients' and the weights' own units: these are about 0.01 to 1."""
BF16 = 2.0**-6
"""Largest |Δ|₂ / |right|₂ in bf16, of gradients and of the way that the weights have gone. A bf16 number has 8 bits, so
one rounding is off by 2⁻⁹ at the most; a gradient of two layers has gone through eight of them."""
CLIP_NORM = 0.1
_ROUNDS_OF_BATCHES = 6


@dataclass(frozen=True)
class Case:
    """One row of the certificate."""

    strategy: str
    """`baseline`, `dp`, `ddp`, `manual`, or a user's own as `module:Class`."""
    way: str
    """What is special, in words."""
    config: Config
    alone: bool = False
    """Each rank trains the whole by itself."""
    resumed_at: int = 0
    """Saved, and gone on from there as a new start; 0: in one piece."""
    limit: float = EXACT
    is_relative: bool = False

    @property
    def name(self) -> str:
        """As it is shown."""
        name = self.strategy.rpartition(":")[2]
        return f"{name}, {self.way}" if self.way else name


def cases(world_size: int, own: str | None = None) -> Iterator[Case]:
    """All rows for so many ranks; for a strategy of the user's own only those that concern it."""
    base = job(world_size)
    if own is None:
        yield Case("baseline", "", _with(base, "baseline"), alone=True)
        yield Case("baseline", "4 micro-batches", _with(base, "baseline", accumulation=4), alone=True)
        yield Case("dp", "unequal chunks", _with(base, "dp"), alone=True)
    for name in (own,) if own else ("ddp", "manual"):
        yield from _of_ranks(name, base)


def _of_ranks(name: str, base: Config) -> Iterator[Case]:
    """A strategy that talks to other ranks, in every way that has been got wrong before."""
    yield Case(name, "", _with(base, name))
    yield Case(name, "4 micro-batches", _with(base, name, accumulation=4))
    yield Case(name, "partial windows", _with(base, name, accumulation=4, drop_last=False))
    yield Case(name, "clipped", _with(base, name, clip_norm=CLIP_NORM, drop_last=False))
    yield Case(name, "resumed", _with(base, name, drop_last=False), resumed_at=STEPS // 2)
    rounded = _with(base, name, precision="bf16", optimizer="sgd", drop_last=False)
    yield Case(name, "bf16", rounded, limit=BF16, is_relative=True)


def job(world_size: int) -> Config:
    """A table of classes, a model of two layers; every seventh global batch is a single sample, where not dropped."""
    size = 4 * world_size * math.ceil(4 / world_size)
    return Config(
        model=ModelConfig(name="train.checks.verify.cases:model"),
        # One sample is held out (a share of all that rounds to none), and one is left for an epoch's last batch.
        data=DataConfig(name="classification", size=_ROUNDS_OF_BATCHES * size + 2, val_fraction=1e-9, drop_last=True),
        batch=BatchConfig(global_size=size),
        optim=OptimConfig(lr=0.01, clip_norm=0.0, warmup_steps=3, min_lr_ratio=0.1),
        precision=PrecisionConfig(name="fp64"),
        train=TrainConfig(steps=STEPS, check_replicas_every=0, tensorboard=False, sample_tokens=0, save_every=0),
    )


def model(off_by: int = 0) -> nn.Module:
    """Two layers, with weights that are others on each rank: to make them equal is the strategy's work.

    tanh and not ReLU: a rounding that takes a number from just above zero to just below changes ReLU's gradient by all
    of it, and no limit could be given for bf16.
    """
    made = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * off_by)
    return made


def for_rank(config: Config, rank: int) -> Config:
    """The config with the model that this rank begins with."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, args={"off_by": rank}))


def _with(
    base: Config,
    strategy: str,
    *,
    accumulation: int | None = None,
    clip_norm: float = 0.0,
    drop_last: bool = True,
    precision: str = "fp64",
    optimizer: str = "adamw",
) -> Config:
    known = strategy in ("dp", "ddp", "manual")
    optim = dataclasses.replace(base.optim, clip_norm=clip_norm, name=optimizer)  # type: ignore[arg-type]
    if optimizer == "sgd":  # weights go as far as the gradients are long: their error is no other than those'
        optim = dataclasses.replace(optim, schedule="constant", warmup_steps=0, lr=0.1, weight_decay=0.0)
    return dataclasses.replace(
        base,
        strategy=StrategyConfig(name=strategy if known else "baseline"),  # type: ignore[arg-type]
        batch=dataclasses.replace(base.batch, accumulation=accumulation),
        data=dataclasses.replace(base.data, drop_last=drop_last),
        precision=PrecisionConfig(name=precision),  # type: ignore[arg-type]
        optim=optim,
    )
