"""The user's own data: `module:function` that returns (training set, validation set), both map-style."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from train.config import DataConfig
from train.errors import UsageError
from train.own import call
from train.seeds import mix, seed_everything


class OwnSamples:
    """A map-style data set of (input, …, target), fetched by whole batches where it knows how."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, ids: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """The batch: by one indexing of a TensorDataset, by its own `gather`, else sample by sample.

        What is random in a sample (augmentation) depends on `seed` and its id, not on who fetches it, or after what.
        """
        if isinstance(self.dataset, TensorDataset):
            return tuple(tensor[ids] for tensor in self.dataset.tensors)
        if hasattr(self.dataset, "gather"):
            seed_everything(mix(seed, int(ids[0])))
            return tuple(self.dataset.gather(ids))
        samples = []
        for place in ids.tolist():
            seed_everything(mix(seed, place))
            samples.append(self.dataset[place])
        return tuple(default_collate(samples))


def open_own(config: DataConfig, seed: int) -> tuple[OwnSamples, OwnSamples, str]:
    """Training set, validation set, fingerprint. Raises UsageError on anything but two map-style sets of tuples."""
    seed_everything(seed)  # the same random_split on every rank and at every start
    made = call("data", config.name, config.args)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(f"data.name: {config.name} must return (training set, validation set), not {_kind(made)}")
    opened = []
    digest = hashlib.sha256()
    for dataset in made:
        is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise UsageError(
                f"data.name: {config.name} returned {_kind(dataset)}, which has no length or index: the order of "
                "samples is index arithmetic, so that any world size sees the same batches; give it __len__ and "
                "__getitem__ "
                "(a list, a TensorDataset, or a Dataset over an index of your files)"
            )
        digest.update(_digest(config.name, dataset))
        opened.append(OwnSamples(dataset))
    return opened[0], opened[1], f"{len(opened[0])}+{len(opened[1])}:{digest.hexdigest()[:16]}"


def _digest(name: str, dataset: Any) -> bytes:
    """Length and a few samples spread over the set."""
    length = len(dataset)
    digest = hashlib.sha256(str(length).encode())
    for place in sorted({i * (length - 1) // 7 for i in range(8)} if length else ()):
        seed_everything(place)
        sample = dataset[place]
        if not isinstance(sample, tuple | list) or len(sample) < 2:
            raise UsageError(f"data.name: samples of {name} must be (input, …, target), not {_kind(sample)}")
        for part in sample:
            digest.update(_bytes(part))
    return digest.digest()


def _bytes(part: Any) -> bytes:
    if not isinstance(part, torch.Tensor):
        return pickle.dumps(part)
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # any type: bfloat16 too


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
