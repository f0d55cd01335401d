"""Whole checkpoints: written aside, synced, renamed, with a manifest of hashes; verified before they are used.

`checkpoints/step-<n>/state.pt` is a plain `torch.load(weights_only=True)` file; names carry no prefixes.
Only `save` changes anything: who reads may do so beside a run that goes on.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from train.disk import hash_of_file, in_words, is_gone, need_room, sync, sync_name
from train.errors import CheckpointError, UnreadableError

_FILE = "state.pt"
_NAME = re.compile(r"(?:\.replaced-)?step-([0-9]{8,})")
_WRITING, _REPLACED, _REMOVING = ".writing-", ".replaced-", ".removing-"
_MOST_READINGS = 20
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
        self._is_synced = False
        self._passed_over: set[Path] = set()

    def save(self, step: int, state: State) -> Path:
        """Write one; it is whole or not there at all. Raises CheckpointError; older ones stay then."""
        target = self.folder / name_of(step)
        aside = self.folder / f"{_WRITING}{target.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._is_synced:  # made just now, or by a start that was killed at once
                sync_name(self.folder)
                self._is_synced = True
            self._clear()
            aside.mkdir()
            need_room(aside, sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(state)}.values()))
            torch.save(state, aside / _FILE)
            manifest = {"step": step, "files": {_FILE: hash_of_file(aside / _FILE)}, "torch": torch.__version__}
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
            for path in (aside / _FILE, aside / "manifest.json", aside):
                sync(path)
            if target.exists():  # of an abandoned course; out of the way first, so that there is always a whole one
                target.rename(old := self.folder / f"{_REPLACED}{target.name}")
                aside.rename(target)
                self._remove(old)
            else:
                aside.rename(target)
            sync(self.folder)
            self._point_to(target.name)
            saved = list(self.saved())
        except (OSError, RuntimeError, UnreadableError) as error:  # torch.save says RuntimeError where a disk is full
            shutil.rmtree(aside, ignore_errors=True)
            why = str(error) if isinstance(error, UnreadableError) else in_words(error)
            raise CheckpointError(f"cannot save step {step} in {self.folder}: {why}") from error
        later = [path for path in saved if step_of(path) > step]  # of a course that was given up
        damaged = self._passed_over - {target}  # they are not to be kept in the place of good ones
        earlier = [path for path in saved if step_of(path) < step and path not in damaged]
        for path in [*later, *damaged, *(path for path in earlier[self.keep - 1 :] if not self._stays(path))]:
            self._remove(path)
        self._passed_over = set()
        return target

    def _stays(self, path: Path) -> bool:
        return self.keep_every > 0 and step_of(path) % self.keep_every == 0

    def _clear(self) -> None:
        """Put in order what a killed save has left."""
        for path in self.saved():
            if path.name.startswith(_REPLACED):  # killed between the two renames
                path.rename(self.folder / name_of(step_of(path)))
        for left in list(self.folder.iterdir()):
            if left.name.startswith((_WRITING, _REPLACED, _REMOVING)):
                _delete(left)

    def _remove(self, path: Path) -> None:
        """Its name goes first, at once: nobody is to meet half of it."""
        aside = self.folder / f"{_REMOVING}{path.name}"
        with contextlib.suppress(OSError):
            path.rename(aside)
        _delete(aside)

    def saved(self) -> Iterator[Path]:
        """The checkpoints that are there, newest first; not yet verified. Raises UnreadableError.

        Where a save of a step anew was killed between its two renames, the one of before is there by another name.
        Names of any other form are somebody else's.
        """
        try:
            names = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise UnreadableError(f"{self.folder} leads nowhere: is its disk mounted?") from None
            return
        except OSError as error:
            raise UnreadableError(f"{self.folder} cannot be read: {in_words(error)}") from error
        found = [name for name in names if _is_name(name) and (name[0] != "." or name_of(_step(name)) not in names)]
        yield from (self.folder / name for name in sorted(found, key=_step, reverse=True))

    def newest(self) -> tuple[State, Path, list[str]] | None:
        """The newest one that is whole, its folder, and words on those passed over; None where there is none.

        Only what is damaged for certain is passed over.

        Raises:
            UnreadableError: one cannot be read, but may be good.
            CheckpointError: there are some, but all are damaged: to start anew would hide a loss.
        """
        for _ in range(_MOST_READINGS):
            damaged: list[str] = []
            self._passed_over = set()
            for path in self.saved():
                try:
                    return load(path), path, damaged
                except UnreadableError:
                    raise
                except CheckpointError as error:
                    if is_gone(path):
                        break  # a job at work has removed it: there is a newer one
                    damaged.append(str(error))
                    self._passed_over.add(path)
            else:
                if damaged:
                    raise CheckpointError(f"no checkpoint in {self.folder} is whole: " + "; ".join(damaged))
                return None
        raise UnreadableError(f"{self.folder}: checkpoints go faster than they can be read: try again")

    def _point_to(self, name: str) -> None:
        aside = self.folder / ".latest"
        aside.write_text(name + "\n")
        sync(aside)
        aside.replace(self.folder / "latest")
        sync(self.folder)


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08}"


def step_of(path: Path) -> int:
    """The step of a checkpoint that `saved` has found."""
    return _step(path.name)


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name.removeprefix(_REPLACED) == name_of(_step(name))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def load(path: Path) -> State:
    """A checkpoint's state, on the CPU.

    Raises:
        CheckpointError: it is damaged; the words name the file.
        UnreadableError: it cannot be read, but may be good.
    """
    verify(path)
    try:
        return torch.load(path / _FILE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {in_words(error)}") from error
    except _NOT_LOADED as error:  # no memory for it, another torch: its hashes are right
        raise UnreadableError(_unreadable(path, error)) from error


_NOT_LOADED = (
    OSError, EOFError, UnpicklingError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError,
)  # fmt: skip


def verify(path: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, which is returned.

    Raises:
        CheckpointError: it is damaged: something is missing, or other than its manifest says.
        UnreadableError: that cannot be told: of another user, a disk or a network that fails for now.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        for name, expected in {_FILE: None, **manifest["files"]}.items():
            found = hash_of_file(path / name)
            if found != expected:
                raise CheckpointError(
                    f"{path / name} is damaged: {found['bytes']} bytes with hash {found['sha256'][:12]}, "
                    f"but its manifest says {expected['bytes']} with {expected['sha256'][:12]}"
                )
        return manifest
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {in_words(error)}") from error
    except OSError as error:
        raise UnreadableError(_unreadable(path, error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {in_words(error)}") from error


def _unreadable(path: Path, error: BaseException) -> str:
    return (
        f"{path} cannot be read, but may be good: {in_words(error)}. Nothing is removed, and no older one is taken: "
        "put that right and start again; to give it up, move it elsewhere"
    )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(entry)
