"""Where samples come from: text, token files, digits, made-up tables, or the user's own function."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from train.config import DataConfig
from train.data import text, tokens
from train.data.own import open_own
from train.errors import UsageError

Batch = tuple[torch.Tensor, ...]
"""Inputs of the model, then the target, each with a first dimension of samples."""


class Samples(Protocol):
    """A data set that can be indexed: one call brings a whole batch."""

    def __len__(self) -> int: ...

    def gather(self, ids: torch.Tensor, seed: int = 0) -> Batch:
        """The samples with these ids (int64 [n]), in this order; `seed` decides what is random in them."""
        ...


@dataclass(frozen=True)
class Spec:
    """What a model must know of the data."""

    kind: Literal["tokens", "classes", "numbers", "own"]
    inputs: int = 0
    """Features of a sample; vocabulary size for tokens."""
    outputs: int = 0
    """Classes or numbers to predict; vocabulary size for tokens."""
    item: str = "samples"
    """What losses are averaged over and speed is counted in."""
    items_per_sample: int = 1
    """Usual number of them, to keep scaled losses near their mean."""


@dataclass(frozen=True)
class Data:
    """Opened data."""

    spec: Spec
    train: Samples
    val: Samples
    fingerprint: str
    """Equal on hosts that hold the same data."""
    words: str
    """One line for the log."""
    text: text.Prepared | None = None
    """The bytes behind `text`, to compare with a count model and to prompt from."""


@dataclass(frozen=True)
class Table:
    """Samples held as whole tensors."""

    tensors: Batch

    def __len__(self) -> int:
        return len(self.tensors[0])

    def gather(self, ids: torch.Tensor, seed: int = 0) -> Batch:
        """Rows of each tensor."""
        return tuple(tensor[ids] for tensor in self.tensors)


def open_data(config: DataConfig, seed: int) -> Data:
    """Open what the config names, preparing it first if need be. Raises UsageError."""
    if config.name == "text":
        data = _text(config)
    elif config.name == "tokens":
        data = _tokens(config)
    elif config.name == "digits":
        data = _from_table(config, "classes", 10, *_digits(), seed=seed)
    elif config.name in ("regression", "classification"):
        data = _synthetic(config, seed)
    else:
        train, val, fingerprint = open_own(config, seed)
        words = f"{config.name}: {len(train):,} samples, {len(val):,} held out"
        data = Data(Spec("own", config.vocab_size, config.vocab_size), train, val, fingerprint, words)
    for name, samples in (("training", data.train), ("validation", data.val)):
        if len(samples) == 0:
            raise UsageError(f"data.name: {config.name} has no {name} samples ({data.words})")
    return data


def _text(config: DataConfig) -> Data:
    prepared = text.prepare(config)
    train, val = (tokens.Windows(stream, config.block_size) for stream in (prepared.train, prepared.val))
    spec = Spec("tokens", 256, 256, "bytes", config.block_size)
    return Data(spec, train, val, prepared.fingerprint, prepared.words, prepared)


def _tokens(config: DataConfig) -> Data:
    train, val = (tokens.Windows.open(path, config.block_size, config.vocab_size) for path in config.path_list)
    words = f"tokens: {len(train.stream):,} to train on, {len(val.stream):,} held out"
    spec = Spec("tokens", config.vocab_size, config.vocab_size, "tokens", config.block_size)
    return Data(spec, train, val, " ".join(tokens.fingerprint(path) for path in config.path_list), words)


def _synthetic(config: DataConfig, seed: int) -> Data:
    """The tutorial's shapes (10 features, 5 outputs), with something in them to learn."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(config.size, 10, generator=generator)
    answers = features @ torch.randn(10, 5, generator=generator)
    if config.name == "classification":
        return _from_table(config, "classes", 5, features, answers.argmax(1), seed=seed)
    noise = 0.1 * torch.randn(config.size, 5, generator=generator)
    return _from_table(config, "numbers", 5, features, answers + noise, seed=seed)


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "data.name: digits needs scikit-learn, which is not installed: pip install 'muster[digits]'"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)


def _from_table(
    config: DataConfig,
    kind: Literal["classes", "numbers"],
    outputs: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    seed: int,
) -> Data:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    held_out = max(1, round(len(inputs) * config.val_fraction))
    val, train = (Table((inputs[ids], targets[ids])) for ids in (order[:held_out], order[held_out:]))
    digest = hashlib.sha256()
    for tensor in (inputs, targets):
        digest.update(tensor.numpy().tobytes())
    spec = Spec(kind, inputs=inputs.shape[1], outputs=outputs)
    words = f"{config.name}: {len(train):,} samples, {len(val):,} held out"
    return Data(spec, train, val, f"{len(inputs)}:{digest.hexdigest()[:16]}", words)
