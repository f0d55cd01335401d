"""Optimizer groups, the course of the learning rate by its formula, and clipping against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from train.config import OptimConfig
from train.optim import build_optimizer, learning_rate, scale_and_clip


def course(config: OptimConfig, updates: int) -> list[float]:
    return [learning_rate(config, update, updates) for update in range(updates)]


def test_the_rate_rises_linearly_from_the_first_share_to_the_peak() -> None:
    rates = course(OptimConfig(lr=0.8, warmup_steps=4), 20)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_the_cosine_falls_to_its_middle_and_towards_its_end() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.2)
    assert learning_rate(config, 10, 110) == 1.0
    assert learning_rate(config, 60, 110) == pytest.approx(0.6)  # half way between 1 and 0.2
    quarter = math.sqrt(0.5)  # cos(45°)
    assert learning_rate(config, 35, 110) == pytest.approx(0.2 + 0.8 * (1 + quarter) / 2)
    assert learning_rate(config, 110, 110) == pytest.approx(0.2)
    assert learning_rate(config, 500, 110) == pytest.approx(0.2)


def test_the_cosine_is_torchs_own() -> None:
    clock = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(clock, T_max=25, eta_min=0.03)
    expected = []
    for _ in range(25):
        expected.append(torchs.get_last_lr()[0])
        clock.step()
        torchs.step()
    assert course(OptimConfig(lr=0.3, warmup_steps=0, min_lr_ratio=0.1), 25) == pytest.approx(expected, rel=1e-9)


def test_a_constant_rate_stays() -> None:
    config = OptimConfig(lr=0.5, schedule="constant", warmup_steps=2)
    assert course(config, 5) == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5])


def test_without_warm_up_the_first_update_has_the_peak() -> None:
    assert course(OptimConfig(lr=0.5, warmup_steps=0), 9)[0] == 0.5


@pytest.mark.parametrize("updates", [1, 2, 3, 7])
def test_a_run_shorter_than_its_warm_up_only_rises(updates: int) -> None:
    assert course(OptimConfig(lr=7.0, warmup_steps=7), updates) == pytest.approx([float(i + 1) for i in range(updates)])


# Groups


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(3, 4)
        self.norm = nn.RMSNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def test_matrices_are_decayed_vectors_and_frozen_parameters_are_not() -> None:
    model = Mixed()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3), scaled=False)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(model.matrix.weight): 0.3, id(model.matrix.bias): 0.0, id(model.norm.weight): 0.0}


def test_decay_shrinks_matrices_alone_by_the_formula() -> None:
    model = Mixed()
    nn.init.ones_(model.matrix.bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), scaled=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    torch.testing.assert_close(model.matrix.weight.detach(), before["matrix.weight"] * (1 - 0.1 * 0.5))
    for name in ("matrix.bias", "norm.weight", "frozen.weight"):
        assert torch.equal(model.get_parameter(name), before[name])


@pytest.mark.parametrize("scaled", [False, True])
def test_sgd_with_momentum_by_hand(scaled: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    config = OptimConfig(name="sgd", lr=0.5, momentum=0.5, weight_decay=0.0)
    optimizer = build_optimizer(model, config, scaled=scaled)
    for gradient, expected in [(1.0, 1.5), (1.0, 0.75), (0.0, 0.375)]:  # velocities 1, 1.5, 0.75
        model.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert model.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_adamw_by_hand(scaled: bool) -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.5), scaled=scaled)
    weight, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate([3.0, -1.0, 0.5], 1):
        model.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
        optimizer.step()
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        mean, spread = first / (1 - 0.8**step), second / (1 - 0.9**step)
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * mean / (math.sqrt(spread) + 1e-8)
        assert model.weight.item() == pytest.approx(weight, rel=1e-12)


def test_a_scaler_gets_an_optimizer_that_shows_a_skipped_step() -> None:
    assert not build_optimizer(nn.Linear(2, 2), OptimConfig(), scaled=True).defaults["fused"]
    assert build_optimizer(nn.Linear(2, 2), OptimConfig(), scaled=False).defaults["fused"]


def test_a_model_of_matrices_alone_has_one_group() -> None:
    assert len(build_optimizer(nn.Linear(2, 2, bias=False), OptimConfig(), scaled=False).param_groups) == 1


# Clipping


def gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 4), (5,), (1, 1)]]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("factor", [1.0, 0.25, 8.0])
@pytest.mark.parametrize("clip_norm", [0.5, 3.0])
def test_scaling_and_clipping_equal_a_multiplication_and_torchs_clipping(
    scale: float, factor: float, clip_norm: float
) -> None:
    ours = gradients(scale)
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in ours]
    for parameter, gradient in zip(parameters, ours, strict=True):
        parameter.grad = gradient * factor
    expected = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    norm = scale_and_clip(ours, torch.tensor(factor, dtype=torch.float64), clip_norm, measure=False)
    assert norm is not None
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    for parameter, gradient in zip(parameters, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=0)


def test_the_norm_is_that_of_all_gradients_together_after_scaling() -> None:
    pair = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    norm = scale_and_clip(pair, torch.tensor(2.0), 1.0, measure=False)
    assert norm is not None
    assert float(norm) == pytest.approx(10.0)
    assert [float(g) for g in pair] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_a_clip_norm_of_0_scales_only_and_measures_where_asked() -> None:
    for measure in (False, True):
        ours = gradients(10.0)
        norm = scale_and_clip(ours, torch.tensor(0.5, dtype=torch.float64), 0.0, measure=measure)
        for gradient, original in zip(ours, gradients(10.0), strict=True):
            torch.testing.assert_close(gradient, 0.5 * original)
        squares = sum(float((0.5 * g).square().sum()) for g in gradients(10.0))
        assert (norm is not None) == measure
        assert norm is None or float(norm) == pytest.approx(math.sqrt(squares))


def test_float32_gradients_stay_float32_under_a_float64_factor() -> None:
    ours = [g.float() for g in gradients(1.0)]
    scale_and_clip(ours, torch.tensor(0.5, dtype=torch.float64), 1.0, measure=True)
    assert {g.dtype for g in ours} == {torch.float32}
