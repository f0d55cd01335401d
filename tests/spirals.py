"""A user's own job in one file: a model, two data sets and a loss. Start it from the folder that holds it."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def data(points: int = 2000) -> tuple[TensorDataset, TensorDataset]:
    """Points on two interleaved spirals; returns (training set, validation set)."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(points) % 2
    turn = 3 * math.pi * torch.rand(points, generator=generator).sqrt()
    angle = turn + math.pi * label
    noise = 0.1 * torch.randn(points, 2, generator=generator)
    xy = torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1) / 5 + noise
    return TensorDataset(xy[200:], label[200:]), TensorDataset(xy[:200], label[:200])


def model(width: int = 64) -> nn.Module:
    """Any module that takes a batch of inputs."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One loss a sample: Muster takes the exact mean over all ranks and micro-batches."""
    return nn.functional.cross_entropy(output, target, reduction="none", label_smoothing=0.05)
