"""Losses: sums and counts against what is worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from train.config import ModelConfig
from train.errors import UsageError
from train.models import (
    Objective,
    build_loss,
    count_correct,
    default_loss,
)


def test_classes_have_the_sum_of_their_cross_entropies() -> None:
    logits, targets = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2, 1, 3])
    loss, count = default_loss(logits, targets)
    by_hand = sum(
        math.log(sum(math.exp(x) for x in row)) - float(row[t]) for row, t in zip(logits, targets, strict=True)
    )
    assert float(loss) == pytest.approx(by_hand, rel=1e-12)
    assert int(count) == 6


def test_a_target_of_minus_100_is_no_item() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    targets = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    loss, count = default_loss(logits, targets)
    kept = F.cross_entropy(torch.stack((logits[0, 0], logits[0, 2], logits[1, 2])), torch.tensor([1, 2, 0]))
    assert float(loss) == pytest.approx(3 * float(kept), rel=1e-12)
    assert int(count) == 3


def test_nothing_but_targets_of_minus_100_is_a_loss_of_0_over_0_items() -> None:
    loss, count = default_loss(torch.randn(2, 7, requires_grad=True), torch.tensor([-100, -100]))
    loss.backward()
    assert (loss.item(), int(count)) == (0.0, 0)


def test_numbers_count_as_one_item_a_row() -> None:
    output = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, -1.0]])
    target = torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, -1.0]])
    loss, count = default_loss(output, target)
    assert float(loss) == 2.5 + 2.0 + 0.0
    assert int(count) == 3
    loss, count = default_loss(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 2.0]))
    assert (float(loss), int(count)) == (5.0, 2)


def test_a_column_of_outputs_against_flat_targets_is_never_spread_to_a_square() -> None:
    output, target = torch.tensor([[1.0], [4.0], [0.0]]), torch.tensor([0.0, 2.0, 0.0])
    try:
        loss, count = default_loss(output, target)
    except UsageError:
        return  # saying so is as good
    assert (float(loss), int(count)) == (5.0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_short_numbers_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(4000, 5).to(dtype), torch.randint(5, (4000,))
    loss, _ = default_loss(logits, targets)
    exact, _ = default_loss(logits.double(), targets)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact), rel=1e-5)


def test_sums_over_any_split_make_the_whole() -> None:
    logits = torch.randn(10, 7, dtype=torch.float64)
    targets = torch.tensor([1, -100, 2, 3, -100, -100, 4, 5, 6, 0])
    whole = default_loss(logits, targets)
    parts = [default_loss(a, b) for a, b in zip(logits.split(3), targets.split(3), strict=True)]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole[0]), rel=1e-12)
    assert sum(int(count) for _, count in parts) == int(whole[1]) == 7


def test_the_objective_returns_one_sum_and_one_count() -> None:
    model = nn.Linear(3, 4)
    x, y = torch.randn(5, 3), torch.tensor([0, 1, -100, 3, 2])
    loss, count = Objective(model, build_loss(ModelConfig()))(x, y)
    assert loss.shape == count.shape == (1,)
    assert loss.item() == pytest.approx(4 * F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert int(count) == 4


def test_the_objective_hands_all_but_the_last_to_the_model() -> None:
    class Add(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    loss, _, output = Objective(Add(), default_loss).measure(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 1))
    assert output.tolist() == [[2.0], [2.0]]
    assert float(loss) == 8.0


def test_your_own_loss_may_return_one_an_item(mine: Any) -> None:
    mine.loss = lambda output, target: (output - target).abs().squeeze(1)
    objective = Objective(nn.Identity(), build_loss(ModelConfig(loss="my_models:loss")))
    loss, count = objective(torch.tensor([[1.0], [-2.0], [3.0]]), torch.zeros(3, 1))
    assert (loss.tolist(), count.tolist()) == ([6.0], [3])


@pytest.mark.parametrize("count", [7, torch.tensor(7)])
def test_your_own_loss_may_return_a_sum_and_a_count(count: Any) -> None:
    objective = Objective(nn.Identity(), lambda output, target: (output.sum(), count))
    loss, found = objective(torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert (loss.tolist(), found.tolist()) == ([3.0], [7])


def test_your_own_loss_may_not_return_a_mean() -> None:
    with pytest.raises(UsageError) as caught:
        Objective(nn.Identity(), F.mse_loss)(torch.ones(2), torch.zeros(2))
    words = str(caught.value)
    assert words.startswith("model.loss: your loss returned one number")
    assert "reduction='none'" in words
    assert "(sum, count)" in words


def test_correct_answers_are_counted_for_classes_only() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert count_correct(logits, torch.tensor([1, 1, -100])).tolist() == [1, 2]
    assert count_correct(torch.zeros(3, 2), torch.zeros(3, 2)).tolist() == [0, 0]
    assert count_correct(torch.zeros(3), torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0]
