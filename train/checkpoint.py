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

    def __init__(self, folder: Path, keep: int, keep_every: int = 0) -> None:
        """
        Args:
            folder: `checkpoints` of a run folder; need not exist yet.
            keep: how many of the newest stay.
            keep_every: those of its multiples stay as well; 0: none.
        """
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every

    def save(self, step: int, state: State) -> Path:
        """Write one; it is whole or not there at all. Raises CheckpointError; older ones stay then."""
        target = self.folder / f"step-{step:08}"
        aside = self.folder / f".writing-{target.name}"
        try:
            for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".replaced-*")):  # by a killed save
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
            _need_room(aside, state)
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
        for path in [*later, *(path for path in earlier[self.keep - 1 :] if not self._stays(path))]:
            shutil.rmtree(path, ignore_errors=True)
        return target

    def _stays(self, path: Path) -> bool:
        return self.keep_every > 0 and _step_of(path) % self.keep_every == 0

    def saved(self) -> Iterator[Path]:
        """The checkpoints that are there, newest first; not yet verified."""
        yield from sorted(self.folder.glob("step-[0-9]*"), key=_step_of, reverse=True)

    def newest(self) -> tuple[State, Path, list[str]] | None:
        """The newest one that is whole, its folder, and words on those passed over; None where there is none.

        Raises CheckpointError where there are some, but all are damaged: to start anew would hide a loss.
        """
        for old in self.folder.glob(".replaced-*"):  # killed between the two renames of a step that was saved again
            target = self.folder / old.name.removeprefix(".replaced-")
            if not target.exists():
                old.rename(target)
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
    verify(path)
    try:
        return torch.load(path / _FILE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, EOFError, UnpicklingError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {_words(error)}") from error


def verify(path: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, which is returned. Raises CheckpointError."""
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        for name, expected in manifest["files"].items():
            found = _hash(path / name)
            if found != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: {found['bytes']} bytes with hash {found['sha256'][:12]}, "
                    f"but its manifest says {expected['bytes']} with {expected['sha256'][:12]}"
                )
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {_words(error)}") from error


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(entry)


def _need_room(folder: Path, state: State) -> None:
    """Raise OSError(ENOSPC) before anything is written that would not fit."""
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(state)}.values())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(errno.ENOSPC, f"it takes {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free")


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


def _owner_of(path: Path) -> str:
    """`, which belongs to user 0`: of the nearest folder that can be looked at."""
    for place in (path, *path.parents):
        try:
            return f" ({place if place != path else 'it'} belongs to user {place.stat().st_uid})"
        except OSError:
            continue
    return ""


def _words(error: BaseException) -> str:
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return "the disk is full" + (f": {cause.strerror}" if "free" in str(cause.strerror) else "")
    if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM):
        owner = _owner_of(Path(cause.filename)) if cause.filename else ""
        return f"user {os.geteuid()} may not touch {cause.filename}{owner}: start the job as its owner, or chown it"
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return "the file system is mounted read-only"
    if isinstance(cause, FileNotFoundError) and cause.filename:
        return f"it has no {Path(cause.filename).name}"
    if "unexpected pos" in str(error):  # what torch's zip writer says when a write came up short
        return "the disk is full, or failing"
    return f"{type(error).__name__}: {error}".splitlines()[0]
