"""Mixed precision trains like float32, and an infinite gradient costs one update, not the run."""

from __future__ import annotations

import pytest
import torch

from tests.jobs import config_of, make_job
from train import loop
from train.optim import learning_rate

RECIPE = (
    "model.layers=1", "model.width=32", "data.block_size=32", "data.val_fraction=0.002", "batch.global_size=16",
    "train.steps=80", "optim.warmup_steps=10",
)  # fmt: skip


def _loss(precision: str) -> float:
    job = make_job(config_of(*RECIPE, f"precision.name={precision}"))
    loop.fit(job)
    assert job.progress.evaluation is not None
    return job.progress.evaluation.loss


@pytest.mark.slow
def test_bf16_and_fp16_train_to_within_two_percent_of_fp32() -> None:
    reference = _loss("fp32")
    assert reference < 3.8  # from 5.5: it has learned something
    for precision in ("bf16", "fp16"):
        assert _loss(precision) == pytest.approx(reference, rel=0.02), precision


def test_an_infinite_gradient_skips_the_update_and_the_schedule_waits() -> None:
    job = make_job(
        config_of("model.name=mlp", "data.name=classification", "precision.name=fp16", "train.steps=8",
                  "precision.initial_scale=1024", "train.log_every=1", "optim.warmup_steps=4", "optim.min_lr_ratio=0")
    )  # fmt: skip
    calls = 0

    def inject(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("inf") if calls == 3 else gradient

    weight = next(job.objective.model.parameters())
    weight.register_hook(inject)
    rates: list[float] = []
    seen: list[torch.Tensor] = []
    job.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    real = job.precision.step

    def step(optimizer: torch.optim.Optimizer) -> bool:
        stepped = real(optimizer)
        seen.append(weight.detach().clone())
        return stepped

    job.precision.step = step  # type: ignore[method-assign]
    assert loop.fit(job)
    assert calls == 8
    assert (job.progress.step, job.progress.updates) == (8, 7)
    assert torch.equal(seen[2], seen[1])  # the third update did not happen,
    assert not torch.equal(seen[3], seen[2])  # the fourth did
    assert job.precision.scaler is not None
    assert job.precision.scaler.get_scale() == 512
    assert rates == [learning_rate(job.config.optim, update, 8) for update in range(7)]
    assert all(bool(torch.isfinite(p).all()) for p in job.objective.model.parameters())
