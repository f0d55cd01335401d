"""Options of ddp that change what travels, or how the model runs, still train."""

from __future__ import annotations

import pytest
import torch

from tests.jobs import config_of, make_job, weights
from tests.ranks import run_ranks
from train import loop

TABLE = (
    "model.name=mlp",
    "data.name=classification",
    "batch.global_size=16",
    "train.steps=60",
    "optim.warmup_steps=5",
    "optim.lr=0.03",
)
DDP = "strategy.name=ddp"
CASES = {
    "plain": [DDP],
    "fp16 hook": [DDP, "strategy.comm_hook=fp16"],
    "bf16 hook": [DDP, "strategy.comm_hook=bf16"],
    "powersgd": [DDP, "strategy.comm_hook=powersgd", "strategy.powersgd_rank=2"],
    "unused parameters looked for": [DDP, "strategy.find_unused_parameters=true"],
    "fp16 with a scaler, accumulation": [
        DDP,
        "precision.name=fp16",
        "precision.initial_scale=1024",
        "batch.accumulation=2",
    ],
}


def _train_each(cases: dict[str, list[str]]) -> dict[str, tuple[float, torch.Tensor]]:
    results = {}
    for name, flags in cases.items():
        job = make_job(config_of(*TABLE, *flags, world_size=2))
        loop.fit(job)
        assert job.progress.evaluation is not None
        results[name] = (job.progress.evaluation.loss, weights(job))
    return results


@pytest.mark.slow
def test_compressed_gradients_train_nearly_as_well_and_ranks_agree() -> None:
    first, second = run_ranks(2, _train_each, CASES)
    plain, plain_weights = first["plain"]
    assert plain < 0.8  # from ln 5 = 1.61
    for name, (loss, theirs) in first.items():
        assert torch.equal(theirs, second[name][1]), name
        assert loss == pytest.approx(plain, rel=0.15), name
    assert torch.equal(first["unused parameters looked for"][1], plain_weights)
    for name in ("fp16 hook", "bf16 hook", "powersgd"):
        assert not torch.equal(first[name][1], plain_weights), f"{name} changed nothing: is it on?"


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_weights() -> None:
    results = run_ranks(2, _train_each, {"plain": [DDP], "compiled": [DDP, "model.compile=true"]}, timeout_s=280)
    for plain, compiled in ((r["plain"][1], r["compiled"][1]) for r in results):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)
