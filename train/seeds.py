"""Where randomness comes from: seeds mixed of what decides it, so that nothing depends on what ran before."""

from __future__ import annotations

import random

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """Numbers into one seed of 63 bits, so that near inputs give far seeds (splitmix64's finalizer)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed torch, Python and numpy: for the user's own code, which may draw from any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
