"""The same job on a GPU: skipped where there is none. Not run yet on any: see "Limits" in README."""

from __future__ import annotations

import math

import pytest
import torch

from tests.jobs import config_of, make_job, weights
from train import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TEXT = (
    "model.layers=2", "model.width=64", "data.block_size=64", "batch.global_size=16", "train.steps=60",
    "optim.warmup_steps=5", "data.val_fraction=0.002", "runtime.device=cuda",
)  # fmt: skip


def _run(*flags: str) -> tuple[float, torch.Tensor]:
    job = make_job(config_of(*TEXT, *flags))
    assert job.runtime.device.type == "cuda"
    assert loop.fit(job)
    assert job.progress.evaluation is not None
    return job.progress.evaluation.loss, weights(job)


def test_a_gpu_trains_like_a_cpu() -> None:
    on_gpu, _ = _run()
    job = make_job(config_of(*TEXT, "runtime.device=cpu"))
    loop.fit(job)
    assert job.progress.evaluation is not None
    assert on_gpu < math.log(256) - 1
    assert on_gpu == pytest.approx(job.progress.evaluation.loss, rel=0.02)


@pytest.mark.parametrize("strategy", ["ddp", "manual", "dp"])
def test_each_strategy_equals_the_baseline_in_float64(strategy: str) -> None:
    exact = ("precision.name=fp64", "train.steps=10", "batch.accumulation=2")
    _, baseline = _run(*exact)
    _, theirs = _run(*exact, f"strategy.name={strategy}")
    torch.testing.assert_close(theirs, baseline, rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_to_within_two_percent(precision: str) -> None:
    reference, _ = _run()
    assert _run(f"precision.name={precision}")[0] == pytest.approx(reference, rel=0.02)


def test_twice_the_same_is_the_same() -> None:
    assert torch.equal(_run()[1], _run("data.loader=workers")[1])


def test_compiled_in_bf16_on_ddp() -> None:
    flags = ("precision.name=bf16", "strategy.name=ddp")
    assert _run(*flags, "model.compile=true")[0] == pytest.approx(_run(*flags)[0], rel=0.02)
