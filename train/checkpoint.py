"""Whole checkpoints: written aside, synced, renamed, with a manifest of hashes; verified before they are used.

`checkpoints/step-<n>/state.pt` is a plain `torch.load(weights_only=True)` file; names carry no prefixes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from train.errors import CheckpointError
from train.runtime import Runtime

_FILE = "state.pt"
State = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Only rank 0 writes and reads files."""

    def __init__(self, folder: Path, keep: int) -> None:
        """
        Args:
            folder: `checkpoints` of a run folder; need not exist yet.
            keep: how many of the newest stay.
        """
        self.folder = folder
        self.keep = keep

    def save(self, step: int, state: State) -> Path:
        """Write one; it is whole or not there at all. Raises CheckpointError; older ones stay then."""
        target = self.folder / f"step-{step:08}"
        aside = self.folder / f".writing-{target.name}"
        try:
            for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".replaced-*")):  # by a killed save
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
            torch.save(state, aside / _FILE)
            manifest = {"step": step, "files": {_FILE: _hash(aside / _FILE)}, "torch": torch.__version__}
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (aside / _FILE, aside / "manifest.json", aside):
                _sync(path)
            if target.exists():  # of an abandoned course; out of the way first, so that there is always a whole one
                target.rename(old := self.folder / f".replaced-{target.name}")
                aside.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                aside.rename(target)
            _sync(self.folder)
            self._point_to(target.name)
        except (OSError, RuntimeError) as error:  # torch.save says RuntimeError where a disk is full
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(f"cannot save step {step} in {self.folder}: {_words(error)}") from error
        later = [path for path in self.saved() if _step_of(path) > step]  # of a course that was given up
        earlier = [path for path in self.saved() if _step_of(path) < step]
        for path in [*later, *earlier[self.keep - 1 :]]:
            shutil.rmtree(path, ignore_errors=True)
        return target

    def saved(self) -> Iterator[Path]:
        """The checkpoints that are there, newest first; not yet verified."""
        yield from sorted(self.folder.glob("step-[0-9]*"), key=_step_of, reverse=True)

    def newest(self) -> tuple[State, Path, list[str]] | None:
        """The newest one that is whole, its folder, and words on those passed over; None where there is none.

        Raises CheckpointError where there are some, but all are damaged: to start anew would hide a loss.
        """
        damaged: list[str] = []
        for path in self.saved():
            try:
                return load(path), path, damaged
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: " + "; ".join(damaged))
        return None

    def _point_to(self, name: str) -> None:
        aside = self.folder / ".latest"
        aside.write_text(name + "\n")
        _sync(aside)
        aside.replace(self.folder / "latest")
        _sync(self.folder)


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


def load(path: Path) -> State:
    """A checkpoint's state, on the CPU. Raises CheckpointError naming the file that is missing or damaged."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name, expected in files.items():
            found = _hash(path / name)
            if found != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: {found['bytes']} bytes with hash {found['sha256'][:12]}, "
                    f"but its manifest says {expected['bytes']} with {expected['sha256'][:12]}"
                )
        return torch.load(path / _FILE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except CheckpointError:
        raise
    except (
        OSError,
        EOFError,
        UnpicklingError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {_words(error)}") from error


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


def _hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _words(error: BaseException) -> str:
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return "the disk is full"
    if "unexpected pos" in str(error):  # what torch's zip writer says when a write came up short
        return "the disk is full, or failing"
    return f"{type(error).__name__}: {error}".splitlines()[0]
