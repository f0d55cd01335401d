"""Small states to be saved, and whether two are the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.checkpoint import State


def state_at(step: int) -> State:
    """Another one for each step."""
    torch.manual_seed(step)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {"step": step, "best_eval_loss": float("inf")},
        "config": {"data": {"paths": ["a", "b"]}, "betas": [0.9, 0.95], "loss": None},
    }


def same(one: Any, two: Any) -> bool:
    """Kind, order, type and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def flip_a_bit(file: Path) -> None:
    """In the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
