"""Who waits for whom: a rank that is slow computes, the others wait, in each strategy that sends gradients."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import config_of, make_job
from tests.ranks import run_ranks
from train import loop
from train.seam import Activity

SLOW_S, STEPS = 0.05, 12
WAYS = {
    "ddp": ["strategy.name=ddp"],
    "ddp, two micro-batches": ["strategy.name=ddp", "batch.accumulation=2"],
    "ddp, rounded": ["strategy.name=ddp", "strategy.comm_hook=bf16"],
    "by hand": ["strategy.name=manual"],
}


def data() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs[:, :1]), TensorDataset(inputs[:4], inputs[:4, :1])


class Slow(nn.Linear):
    """Slow on rank 1, in computing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1 and self.training:
            time.sleep(SLOW_S)
        return super().forward(x)


def model() -> nn.Module:
    return Slow(4, 1)


def _times(ways: dict[str, list[str]]) -> dict[str, tuple[float, float, float]]:
    """For each way: seconds computing, waiting, and in all steps."""
    found = {}
    for name, flags in ways.items():
        own = [f"{what}.name={model.__module__}:{what}" for what in ("model", "data")]
        job = make_job(config_of(*own, *flags, "batch.global_size=8", f"train.steps={STEPS}", world_size=2))
        job.health.start(job.config.runtime)
        before, began_s = job.health.times_s(), time.monotonic()
        loop.fit(job)
        took_s = time.monotonic() - began_s
        spent = [after - was for after, was in zip(job.health.times_s(), before, strict=True)]
        assert sum(spent) == pytest.approx(took_s, abs=0.05)
        found[name] = spent[Activity.COMPUTING], spent[Activity.WAITING], took_s
    return found


def test_the_slow_rank_computes_and_the_other_waits() -> None:
    quick, slow = run_ranks(2, _times, WAYS)
    for name in WAYS:
        asleep_s = (STEPS - 1) * SLOW_S * (2 if "two" in name else 1)  # the first step is apart
        assert slow[name][0] >= asleep_s, name
        assert slow[name][1] < 0.5 * asleep_s, name
        assert quick[name][1] >= 0.7 * asleep_s, (name, quick[name])
        assert quick[name][0] < 0.5 * asleep_s, (name, quick[name])
