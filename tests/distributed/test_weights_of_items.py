"""A loss that gives (sum, count) may weigh items as it likes: the gradient is the weighted mean over the batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import config_of, make_job, weights
from train import loop

MODULE = "tests.distributed.test_weights_of_items"


def model() -> nn.Module:
    return nn.Linear(3, 1)


def data() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(20, 3, generator=generator)
    targets = torch.cat((inputs.sum(1, keepdim=True), torch.rand(20, 1, generator=generator) * 0.01), 1)
    return TensorDataset(inputs, targets), TensorDataset(inputs[:2], targets[:2])


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error; the target's second column is the item's weight. A batch's weights add up to far below 1."""
    weight = target[:, 1]
    return (weight * (output[:, 0] - target[:, 0]).square()).sum(), weight.sum()


def test_weights_below_one_are_divided_by_and_not_clamped() -> None:
    job = make_job(
        config_of(f"model.name={MODULE}:model", f"data.name={MODULE}:data", f"model.loss={MODULE}:loss",
                  "precision.name=fp64", "batch.global_size=8", "batch.micro_size=3", "train.steps=6",
                  "optim.name=sgd", "optim.lr=0.1", "optim.schedule=constant", "optim.warmup_steps=0",
                  "optim.clip_norm=0", "optim.weight_decay=0")
    )  # fmt: skip
    layer = job.objective.model
    assert isinstance(layer, nn.Linear)
    by_hand = nn.Linear(3, 1).double()
    by_hand.load_state_dict(layer.state_dict())
    assert loop.fit(job)
    for step in range(6):
        inputs, targets = data()[0][job.order.batch(step)]
        share = targets[:, 1:].double() / targets[:, 1].double().sum()
        error = inputs.double() @ by_hand.weight.T + by_hand.bias - targets[:, :1].double()
        with torch.no_grad():  # the gradient of the weighted mean of squares, on paper
            by_hand.weight.sub_(0.1 * 2 * (share * error).T @ inputs.double())
            by_hand.bias.sub_(0.1 * 2 * (share * error).sum())
    expected = torch.cat((by_hand.weight.reshape(-1), by_hand.bias)).detach()
    torch.testing.assert_close(weights(job), expected, rtol=0, atol=1e-12)
