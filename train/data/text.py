"""Text read as bytes: found, split by file, and prepared once a host.

Without paths it is the Python source of the installed torch itself: real text that is on every host already,
and the same wherever torch is the same.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from train.config import DataConfig
from train.errors import UsageError

_DEFAULT_FOLDERS = ("nn", "optim", "distributed", "utils")
_LAYOUT = 1  # raise it when what is prepared changes, so that old caches are not read
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Prepared:
    """Two streams of bytes, memory-mapped."""

    train: Bytes
    val: Bytes
    fingerprint: str
    words: str


@dataclass(frozen=True)
class _File:
    name: str
    """Path relative to where it was asked for: the same on every host."""
    path: Path
    size: int
    mtime_ns: int


def prepare(config: DataConfig) -> Prepared:
    """Find, split and concatenate the files, or take what an earlier run prepared. Raises UsageError.

    One process a host does the work, the others wait for its lock. It is written aside and renamed, so what is
    there is whole.
    """
    files = find_files(config.paths)
    listing = json.dumps([_LAYOUT, config.val_fraction, [(f.name, f.size, f.mtime_ns) for f in files]])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    folder = cache_dir(config)
    target = folder / f"text-{key}"
    try:
        with _locked(folder / f"text-{key}.lock"):
            if not _is_whole(target):
                shutil.rmtree(target, ignore_errors=True)
                _write(files, config.val_fraction, target)
    except OSError as error:
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        raise UsageError(
            f"data.cache_dir: cannot prepare the text in {folder}: {error}{full}; "
            "free some space or give another folder with --data.cache_dir"
        ) from None
    return _open(target)


def find_files(paths: list[str]) -> list[_File]:
    """The files that paths name, sorted by name. Raises UsageError."""
    found: dict[str, _File] = {}
    for root, path in _expand(paths):
        if path.is_file():
            name = path.relative_to(root).as_posix()
            state = path.stat()
            found[name] = _File(name, path, state.st_size, state.st_mtime_ns)
    files = sorted(found.values(), key=lambda file: file.name)
    if not any(file.size for file in files):
        raise UsageError(f"data.paths: {', '.join(paths) or 'the installed torch'} holds no text")
    return files


def _expand(paths: list[str]) -> Iterator[tuple[Path, Path]]:
    """(folder that names are relative to, file) for files, folders and globs."""
    if not paths:
        package = Path(torch.__file__).parent
        for folder in _DEFAULT_FOLDERS:
            yield from ((package, path) for path in (package / folder).rglob("*.py"))
        return
    for given in paths:
        if Path(given).is_dir():
            yield from ((Path(given).parent, path) for path in Path(given).rglob("*"))
            continue
        for match in [given] if Path(given).exists() else glob.glob(given, recursive=True):
            yield Path(match).parent, Path(match)


def split(files: list[_File], fraction: float) -> tuple[list[_File], list[_File]]:
    """Files to train on and files held out: about `fraction` of the bytes, chosen by the names' hashes."""
    by_hash = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    wanted = fraction * sum(file.size for file in files)
    held_out: set[str] = set()
    taken = 0
    for file in by_hash[:-1]:
        if taken >= wanted:
            break
        held_out.add(file.name)
        taken += file.size
    return [f for f in files if f.name not in held_out], [f for f in files if f.name in held_out]


def cache_dir(config: DataConfig) -> Path:
    """The folder for prepared data: the one given, else the user's cache, else a temporary one. Made if missing."""
    if config.cache_dir is not None:
        folder = Path(config.cache_dir).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        raise PermissionError(errno.EACCES, "not writable", str(folder))
    except OSError as error:
        if config.cache_dir is not None:
            raise UsageError(f"data.cache_dir: cannot use {folder}: {error}") from None
    folder = Path(tempfile.gettempdir()) / f"muster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"data.cache_dir: {folder} belongs to somebody else; give another with --data.cache_dir")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        yield


def _write(files: list[_File], fraction: float, target: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        streams = _streams(files, fraction)
        digest = hashlib.sha256()
        for name, stream in streams.items():
            (aside / f"{name}.bin").write_bytes(stream)
            digest.update(len(stream).to_bytes(8, "little") + stream)
        index = {
            "sizes": {name: len(stream) for name, stream in streams.items()},
            "fingerprint": digest.hexdigest()[:16],
            "files": len(files),
        }
        (aside / "index.json").write_text(json.dumps(index))
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _streams(files: list[_File], fraction: float) -> dict[str, bytes]:
    if len(files) == 1:
        whole = files[0].path.read_bytes()
        at = len(whole) - max(2, round(len(whole) * fraction))
        return {"train": whole[: max(0, at)], "val": whole[max(0, at) :]}
    halves = dict(zip(("train", "val"), split(files, fraction), strict=True))
    return {name: b"".join(file.path.read_bytes() for file in half) for name, half in halves.items()}


def _is_whole(target: Path) -> bool:
    try:
        sizes = json.loads((target / "index.json").read_text())["sizes"]
        return all((target / f"{name}.bin").stat().st_size == sizes[name] for name in ("train", "val"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open(target: Path) -> Prepared:
    index = json.loads((target / "index.json").read_text())
    for name, size in index["sizes"].items():
        if size < 2:
            raise UsageError(f"data.paths: too little text: the {name} part has {size} bytes")
    train, val = (np.memmap(target / f"{name}.bin", dtype=np.uint8, mode="r") for name in ("train", "val"))
    words = f"text: {index['files']} files, {len(train):,} bytes to train on, {len(val):,} held out"
    return Prepared(train, val, index["fingerprint"], words)


def trigram_loss(train: Bytes, val: Bytes) -> float:
    """Nats a byte of a trigram count model on `val`: what a model of text must beat.

    Each order is smoothed towards the one below with weight 5 (Jelinek-Mercer with Witten-Bell-like
    counts): p(c|ab) = (n(abc) + 5 p(c|b)) / (n(ab) + 5).
    """
    weight = 5.0
    ones = np.bincount(train, minlength=256).astype(np.float64)
    unigram = (ones + 1) / (ones.sum() + 256)
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=1 << 16).reshape(256, 256)
    bigram = (pairs + weight * unigram) / (pairs.sum(1, keepdims=True) + weight)
    context = train[:-2].astype(np.int64) * 256 + train[1:-1]
    triples = np.bincount(context * 256 + train[2:], minlength=1 << 24)
    seen = np.bincount(context, minlength=1 << 16)
    a, b, c = (val[i : len(val) - 2 + i].astype(np.int64) for i in range(3))
    probability = (triples[(a * 256 + b) * 256 + c] + weight * bigram[b, c]) / (seen[a * 256 + b] + weight)
    return float(-np.log(probability).mean())
