"""How weights move: the optimizer, the course of its learning rate, and clipping."""

from __future__ import annotations

import math

import torch
from torch import nn

from train.config import OptimConfig
from train.errors import UsageError


def build_optimizer(model: nn.Module, config: OptimConfig, *, scaled: bool) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters; only matrices are decayed.

    Args:
        model: on its device already.
        config: which one, and its settings.
        scaled: gradients come from a scaler. Fused optimizers then hide a skipped step inside the kernel, and
            the schedule could not wait for it.

    Raises:
        UsageError: nothing to train.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError("model.name: the model has no parameter that requires a gradient: there is nothing to train")
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind: dict[str, bool] = {"foreach": True} if scaled else {"fused": True}
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, **kind)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, **kind)


def learning_rate(config: OptimConfig, update: int, updates: int) -> float:
    """Learning rate of update number `update` (from 0) of `updates`: linear warm-up, then constant or cosine."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = (update - config.warmup_steps) / max(1, updates - config.warmup_steps)
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def scale_and_clip(
    gradients: list[torch.Tensor], factor: torch.Tensor, clip_norm: float, *, measure: bool
) -> torch.Tensor | None:
    """Multiply the gradients by `factor`, then shrink them to `clip_norm`, in one pass; their norm before clipping.

    Args:
        gradients: changed in place.
        factor: a number, on any device; no host-device synchronisation.
        clip_norm: largest total norm; 0 does not clip.
        measure: return the norm even where nothing is clipped.
    """
    norm = None
    if clip_norm or measure:
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True) * factor
    if clip_norm and norm is not None:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm
