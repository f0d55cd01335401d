"""Fingerprints of parameters: what must change them does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.replicas import fingerprints

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def model_of(values: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(values.clone()))
    module.register_parameter("other", nn.Parameter(torch.ones(3, dtype=values.dtype)))
    return module


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(40, 3, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bits_have_equal_fingerprints_one_a_parameter(dtype: torch.dtype) -> None:
    one, two = fingerprints(model_of(numbers(dtype))), fingerprints(model_of(numbers(dtype)))
    assert one.dtype == torch.int64
    assert one.shape == (2,)
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", TYPES)
def test_any_flipped_bit_changes_its_parameters_fingerprint_alone(dtype: torch.dtype) -> None:
    before = fingerprints(model_of(numbers(dtype)))
    size = numbers(dtype).element_size()
    for place in (0, 63, 119):
        for bit in range(8 * size):
            model = model_of(numbers(dtype))
            raw = next(model.parameters()).data.view(-1).view(torch.uint8)
            raw[place * size + bit // 8] ^= 1 << bit % 8
            after = fingerprints(model)
            assert after[0] != before[0], f"bit {bit} of value {place}"
            assert after[1] == before[1]


@pytest.mark.parametrize("dtype", TYPES)
def test_two_swapped_values_change_it(dtype: torch.dtype) -> None:
    before = fingerprints(model_of(numbers(dtype)))[0]
    for first, second in [(0, 1), (0, 2), (5, 69), (17, 119)]:
        values = numbers(dtype).view(-1)
        values[[first, second]] = values[[second, first]]
        assert fingerprints(model_of(values.view(40, 3)))[0] != before


@pytest.mark.parametrize("dtype", TYPES)
def test_swapping_a_value_with_its_negative_changes_it(dtype: torch.dtype) -> None:
    one = fingerprints(model_of(torch.tensor([1.5, -1.5, 3.0], dtype=dtype)))
    two = fingerprints(model_of(torch.tensor([-1.5, 1.5, 3.0], dtype=dtype)))
    assert one[0] != two[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_two_signs_of_one_changed_together_change_it(dtype: torch.dtype) -> None:
    values = numbers(dtype).view(-1)
    before = fingerprints(model_of(values))[0]
    values[[3, 8]] *= -1
    assert fingerprints(model_of(values))[0] != before


@pytest.mark.parametrize("dtype", TYPES)
def test_the_sign_of_a_zero_changes_it(dtype: torch.dtype) -> None:
    zeros = torch.zeros(9, dtype=dtype)
    before = fingerprints(model_of(zeros))[0]
    zeros[4] = -0.0
    assert torch.equal(zeros, torch.zeros(9, dtype=dtype))  # equal as numbers, not as bits
    assert fingerprints(model_of(zeros))[0] != before


def test_one_differing_step_of_an_update_changes_it() -> None:
    values = numbers(torch.float32)
    nudged = values.clone()
    nudged[20, 1] = torch.nextafter(nudged[20, 1], torch.tensor(9.0))
    assert fingerprints(model_of(values))[0] != fingerprints(model_of(nudged))[0]


def test_a_tensor_that_is_not_contiguous_counts_by_its_values() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    turned = nn.Module()
    turned.register_parameter("weight", nn.Parameter(values.t().contiguous().t()))
    assert fingerprints(turned)[0] == fingerprints(model_of(values))[0]
