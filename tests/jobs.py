"""Small jobs, trained in this process as one rank: what tests compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from train import loop
from train.config import Config
from train.data import open_data
from train.identity import identify
from train.job import build
from train.options import LaunchOptions, checked_config
from train.runtime import Runtime
from train.state import Job
from train.strategies import STRATEGIES

Flags = Sequence[str]


def config_of(*flags: str, world_size: int = 1) -> Config:
    """A checked config from `section.field=value` words."""
    return checked_config([f"--{flag}" for flag in flags], world_size)


def make_job(config: Config, runtime: Runtime | None = None) -> Job:
    """The wired parts of one rank; `runtime` where the process has joined already."""
    if runtime is None:
        needs_group = STRATEGIES[config.strategy.name].needs_group
        me = identify(LaunchOptions(), os.environ)
        runtime = Runtime(me, config.runtime, threads=config.train.threads, group=needs_group)
    job = build(config, runtime, open_data(config.data, config.train.seed))
    job.line.start(0)
    return job


def weights(job: Job) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in job.objective.model.parameters()])


def train_all(cases: dict[str, Flags]) -> dict[str, torch.Tensor]:
    """Train each case from its start; the final weights of this rank. One process group serves them all."""
    me = identify(LaunchOptions(), os.environ)
    results: dict[str, Any] = {}
    runtime: Runtime | None = None
    for name, flags in cases.items():
        config = config_of(*flags, world_size=me.world_size)
        runtime = runtime or Runtime(me, config.runtime, threads=1, group=True)
        job = make_job(config, runtime)
        loop.fit(job)
        results[name] = weights(job)
    if runtime is not None:
        runtime.close()
    return results
