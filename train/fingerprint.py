"""One number for all bits of a state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def hash_of(value: Any) -> str:
    """SHA-256 over nested dicts and lists of tensors and plain values: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key!r}:".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}[".encode())
        for entry in value:
            _add(digest, entry)
    else:
        digest.update(f"{value!r};".encode())
