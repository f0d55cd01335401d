"""Streams of tokens cut into windows: bytes of text, or nanoGPT's `.bin` files of uint16, memory-mapped."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from train.errors import UsageError

NO_TARGET = -100
"""A target that counts for nothing: torch's cross_entropy leaves it out."""

_FINGERPRINT_BLOCK = 1 << 16
_FINGERPRINT_BLOCKS = 1024


class Windows:
    """Windows of `block_size` tokens, side by side: each token is predicted exactly once an epoch."""

    def __init__(self, stream: npt.NDArray[np.generic], block_size: int, vocab_size: int | None = None) -> None:
        """
        Args:
            stream: the tokens, one dimension, any unsigned integer type; may be memory-mapped.
            block_size: tokens a window.
            vocab_size: refuse tokens from this one up, where the type does not rule them out already.
        """
        self.stream = stream
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._offsets = np.arange(block_size + 1)

    @classmethod
    def open(cls, path: str, block_size: int, vocab_size: int) -> Windows:
        """Map a file of uint16 tokens. Raises UsageError."""
        size = Path(path).stat().st_size
        if size % 2 or size < 4:
            raise UsageError(f"data.paths: {path} has {size} bytes: not a file of uint16 tokens (2 bytes each)")
        return cls(np.memmap(path, dtype=np.uint16, mode="r"), block_size, vocab_size)

    def __len__(self) -> int:
        return math.ceil(max(0, len(self.stream) - 1) / self.block_size)

    def gather(self, ids: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets: int64 [n, block_size]. Past the end of the stream targets are NO_TARGET."""
        places = ids.numpy()[:, None] * self.block_size + self._offsets
        end = len(self.stream) - 1
        beyond = places > end if places[:, -1].max() > end else None
        window = self.stream[places if beyond is None else np.minimum(places, end)].astype(np.int64)
        if self.vocab_size is not None and window.max() >= self.vocab_size:
            raise UsageError(
                f"data.vocab_size: the data holds token {window.max()}, but vocab_size is {self.vocab_size}"
            )
        inputs, targets = window[:, :-1], window[:, 1:]
        if beyond is not None:
            targets = np.where(beyond[:, 1:], NO_TARGET, targets)
        return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))


def fingerprint(path: str) -> str:
    """Size and hash of a file; of a large one, of 1024 blocks spread evenly over it."""
    size = Path(path).stat().st_size
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        step = max(_FINGERPRINT_BLOCK, size // _FINGERPRINT_BLOCKS)
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_FINGERPRINT_BLOCK))
        file.seek(max(0, size - _FINGERPRINT_BLOCK))
        digest.update(file.read())
    return f"{size}:{digest.hexdigest()[:16]}"
