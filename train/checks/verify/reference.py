"""What is right: the same job in plain torch and float64, one process, the whole global batch at once.

Nothing of the loop, the strategies or the optimizer's set-up is used here, or the comparison would compare nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from train.checks.verify.cases import model
from train.config import Config
from train.data import Data, Order


@dataclass(frozen=True)
class Reference:
    """A whole training. Gradients and weights are rows of float64, one a step."""

    initial: torch.Tensor
    gradients: torch.Tensor
    """As the optimizer sees them: clipped, where that is asked for."""
    weights: torch.Tensor
    """After each step."""
    parts: list[torch.Tensor]
    """For each step what each rank's samples add to its gradient: [ranks, parameters]."""
    sizes: list[int]
    """Samples of each step's global batch."""
    names: list[str]
    """The parameter that each number belongs to."""


def train(config: Config, data: Data, world_size: int) -> Reference:
    """Train on this rank alone, for all ranks' shares of each batch."""
    order = Order(len(data.train), config.batch.global_size, seed=config.train.seed, drop_last=config.data.drop_last)
    torch.manual_seed(config.train.seed)
    net = model().double()
    parameters = list(net.parameters())
    optimizer = _optimizer(net, config)
    gradients, weights, parts = [], [], []
    initial = _flat([p.detach() for p in parameters])
    for step in range(config.train.steps):
        inputs, labels = data.train.gather(order.batch(step))
        shares = zip(inputs.double().tensor_split(world_size), labels.tensor_split(world_size), strict=True)
        parts.append(torch.stack([_gradient(net, x, y, len(labels)) for x, y in shares]))
        whole = _gradient(net, inputs.double(), labels, len(labels))
        if config.optim.clip_norm:
            whole = whole * min(1.0, config.optim.clip_norm / (float(whole.norm()) + 1e-6))
        _load(parameters, whole)
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, step)
        optimizer.step()
        gradients.append(whole)
        weights.append(_flat([p.detach() for p in parameters]))
    names = [name for name, p in net.named_parameters() for _ in range(p.numel())]
    sizes = [order.size(step) for step in range(config.train.steps)]
    return Reference(initial, torch.stack(gradients), torch.stack(weights), parts, sizes, names)


def _optimizer(net: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The slow and plain kind; matrices are decayed, vectors are not."""
    betas, decay = config.optim.betas, config.optim.weight_decay
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optim.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, foreach=False, fused=False)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, foreach=False, fused=False)


def _rate(config: Config, step: int) -> float:
    """A linear rise, then half a wave down; or always the same."""
    rise, peak = config.optim.warmup_steps, config.optim.lr
    if config.optim.schedule == "constant":
        return peak
    if step < rise:
        return peak * (step + 1) / rise
    low = peak * config.optim.min_lr_ratio
    return low + (peak - low) * (1 + math.cos(math.pi * (step - rise) / (config.train.steps - rise))) / 2


def _gradient(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, items: int) -> torch.Tensor:
    """Of these samples' losses over that many items."""
    loss = nn.functional.cross_entropy(net(inputs), labels, reduction="sum") / items
    return _flat(torch.autograd.grad(loss, list(net.parameters())))


def _load(parameters: list[nn.Parameter], gradient: torch.Tensor) -> None:
    pieces = gradient.split([p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter).clone()


def _flat(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
