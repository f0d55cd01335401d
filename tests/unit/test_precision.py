"""Precision: what is computed in which type, and the scaler that skips a step of infinities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train.config import OptimConfig, PrecisionConfig
from train.optim import build_optimizer
from train.precision import Precision

CPU = torch.device("cpu")


def precision(name: Any, **more: Any) -> Precision:
    return Precision(PrecisionConfig(name=name, **more), CPU)


@pytest.mark.parametrize(
    ("name", "kept", "computed"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("fp64", torch.float64, torch.float64),
    ],
)
def test_parameters_are_kept_in_one_type_and_computed_in_another(
    name: str, kept: torch.dtype, computed: torch.dtype
) -> None:
    how = precision(name)
    model = how.prepare(nn.Linear(3, 2))
    (batch,) = how.cast((torch.randn(4, 3),))
    with how.autocast():
        output = model(batch)
    assert model.weight.dtype == kept
    assert output.dtype == computed
    how.backward(output.float().sum())
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == kept


def test_only_fp16_has_a_scaler() -> None:
    assert [precision(name).scaler is not None for name in ("fp32", "bf16", "fp16", "fp64")] == [
        False,
        False,
        True,
        False,
    ]


def test_casting_leaves_whole_numbers_alone() -> None:
    batch = (torch.ones(2), torch.tensor([1, 2]))
    assert [t.dtype for t in precision("fp64").cast(batch)] == [torch.float64, torch.int64]
    assert precision("bf16").cast(batch) is batch


def one_weight(name: Any = "fp16", **more: Any) -> tuple[Precision, nn.Linear, torch.optim.Optimizer]:
    how = precision(name, **more)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    config = OptimConfig(name="sgd", lr=0.5, weight_decay=0.0)
    return how, model, build_optimizer(model, config, scaled=how.scaler is not None)


def test_gradients_are_scaled_up_in_backward_and_right_after_unscaling() -> None:
    how, model, optimizer = one_weight(initial_scale=1024.0)
    how.backward(model(torch.tensor([[3.0]])).sum())
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 3.0 * 1024.0
    how.unscale(optimizer)
    assert float(model.weight.grad) == 3.0
    assert how.step(optimizer)
    assert model.weight.item() == 0.5


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_of_infinities_is_skipped_and_the_next_good_one_is_taken(bad: float) -> None:
    how, model, optimizer = one_weight(initial_scale=64.0)
    how.backward(model(torch.tensor([[bad]])).sum())
    how.unscale(optimizer)
    assert how.step(optimizer) is False
    assert model.weight.item() == 2.0
    optimizer.zero_grad()
    how.backward(model(torch.tensor([[1.0]])).sum())
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 32.0  # the scale was halved
    how.unscale(optimizer)
    assert how.step(optimizer) is True
    assert model.weight.item() == 1.5


def test_the_scale_grows_after_so_many_good_steps() -> None:
    how, model, optimizer = one_weight(initial_scale=8.0, growth_interval=2)
    for scale in (8.0, 8.0, 16.0, 16.0, 32.0):
        optimizer.zero_grad()
        assert how.state()["scale"] == scale
        how.backward(model(torch.tensor([[1.0]])).sum())
        how.unscale(optimizer)
        assert how.step(optimizer)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp64"])
def test_without_a_scaler_every_step_is_taken(name: str) -> None:
    how, model, optimizer = one_weight(name)
    how.unscale(optimizer)
    model.weight.grad = torch.ones(1, 1)
    assert how.step(optimizer) is True
    assert model.weight.item() == 1.5
    assert how.state() == {}


def test_a_scalers_state_goes_on_where_it_was() -> None:
    how, model, optimizer = one_weight(initial_scale=64.0)
    how.backward(model(torch.tensor([[float("inf")]])).sum())
    how.unscale(optimizer)
    how.step(optimizer)
    later = precision("fp16", initial_scale=64.0)
    later.load(how.state())
    assert later.state() == how.state()
    assert later.state()["scale"] == 32.0


def test_a_state_of_another_precision_is_passed_over() -> None:
    how = precision("fp16", initial_scale=64.0)
    how.load({})
    assert how.state()["scale"] == 64.0
    plain = precision("fp32")
    plain.load(how.state())
    assert plain.state() == {}
