"""Small jobs, trained in this process as one rank: what tests compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import torch

from train import loop
from train.config import Config
from train.data import open_data
from train.identity import Identity, identify
from train.job import build
from train.options import LaunchOptions, checked_config
from train.runtime import Runtime
from train.state import Job
from train.strategies import STRATEGIES

Flags = Sequence[str]


def config_of(*flags: str, world_size: int = 1) -> Config:
    """A checked config from `section.field=value` words."""
    return checked_config([f"--{flag}" for flag in flags], world_size)


@cache
def joined() -> Runtime:
    """This process's ties to the other ranks, for all jobs it trains one after the other."""
    return Runtime(identify(LaunchOptions(), os.environ), Config().runtime, threads=1, group=True)


def make_job(config: Config) -> Job:
    """The wired parts of one rank."""
    if STRATEGIES[config.strategy.name].needs_group:
        runtime = joined()
    else:
        runtime = Runtime(Identity(), config.runtime, threads=1, group=False)
    job = build(config, runtime, open_data(config.data, config.train.seed))
    job.line.start(0)
    return job


def weights(job: Job) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in job.objective.model.parameters()])


def train_all(cases: dict[str, Flags]) -> dict[str, torch.Tensor]:
    """Train each case from its start; the final weights of this rank."""
    results = {}
    for name, flags in cases.items():
        job = make_job(config_of(*flags, world_size=int(os.environ.get("WORLD_SIZE", "1"))))
        loop.fit(job)
        results[name] = weights(job)
    return results
