"""Evaluation: each sample once, on any number of ranks, also where some get none, and with running statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import config_of, make_job
from tests.ranks import run_ranks
from train import loop


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(held_out: int) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64 + held_out, 4, generator=generator)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    return TensorDataset(inputs[:64], labels[:64]), TensorDataset(inputs[64:], labels[64:])


def _evaluate(sizes: list[int]) -> list[tuple[float, float, float, float, int]]:
    """After training: loss and accuracy as evaluated, and as worked out here over the whole set at once."""
    results = []
    for held_out in sizes:
        module = "tests.distributed.test_evaluation"
        config = config_of(
            f"model.name={module}:model", f"data.name={module}:data", f"data.args={{held_out: {held_out}}}",
            "strategy.name=ddp", "batch.global_size=16", "batch.micro_size=3", "train.epochs=2", "precision.name=fp64",
            world_size=2,
        )  # fmt: skip
        job = make_job(config)
        loop.fit(job)
        assert job.progress.evaluation is not None
        found = job.progress.evaluation
        trained = job.objective.model.eval()
        inputs, labels = data(held_out)[1].tensors
        output = trained(inputs.double())
        loss = nn.functional.cross_entropy(output, labels)
        accuracy = (output.argmax(1) == labels).double().mean()
        assert found.accuracy is not None
        results.append((found.loss, float(loss), found.accuracy, float(accuracy), found.samples))
    return results


def test_each_sample_counts_once_and_all_ranks_agree() -> None:
    """21 samples on two ranks, as in pytorch#25162, and one sample, of which the second rank gets none."""
    sizes = [21, 1]
    by_rank = run_ranks(2, _evaluate, sizes)
    assert by_rank[0] == by_rank[1]
    for (loss, by_hand, accuracy, accuracy_by_hand, samples), size in zip(by_rank[0], sizes, strict=True):
        assert samples == size
        assert abs(loss - by_hand) < 1e-12
        assert abs(accuracy - accuracy_by_hand) < 1e-12
