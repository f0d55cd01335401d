"""Rank 0's state for every rank: the other hosts need no file."""

from __future__ import annotations

from typing import Any

import torch

from train.checkpoint import State
from train.runtime import Runtime


def share(state: State | None, runtime: Runtime) -> State | None:
    """Rank 0's state on every rank: the other hosts need no file. Tensors travel one by one."""
    tensors: list[torch.Tensor] = []
    skeleton = runtime.broadcast(_strip(state, tensors))
    if skeleton is None or runtime.world_size == 1:
        return state
    shapes = runtime.broadcast([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    received = tensors or [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in received:
        if tensor.numel():
            runtime.broadcast_tensor(tensor.reshape(-1).view(torch.uint8))  # bytes: Gloo does not know every type
    return _fill(skeleton, received)  # type: ignore[no-any-return]


class _Place(int):
    """Where tensor number n was."""


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.contiguous())
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _strip(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_strip(entry, tensors) for entry in value)
    return value


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _fill(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(entry, tensors) for entry in value)
    return value
