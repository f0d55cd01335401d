"""Text read as bytes: found, split by file, and prepared once a host.

Without paths it is the Python source of the installed torch itself: real text that is on every host already,
and the same wherever torch is the same.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from train.config import DataConfig
from train.errors import UsageError

_DEFAULT_FOLDERS = ("nn", "optim", "distributed", "utils")
_LAYOUT = 3  # raise it when what is prepared changes, so that old caches are not read
_COUNTED = 1 << 26  # bytes that the count model reads
_SHORTEST = 3  # bytes: a trigram
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
    """Place among the paths asked for, and the path below it: the same on every host."""
    path: Path
    size: int
    mtime_ns: int


def prepare(config: DataConfig) -> Prepared:
    """Find, split and concatenate the files, or take what an earlier run prepared. Raises UsageError.

    One process a host does the work, the others wait for its lock. It is written aside and renamed, so what is
    there is whole.
    """
    files = find_files(config.path_list)
    states = [(file.name, str(file.path.absolute()), file.size, file.mtime_ns) for file in files]
    listing = json.dumps([_LAYOUT, config.val_fraction, states])
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
    """The files that paths name, each once, in the order of paths and then of names; empty ones are left out.

    Raises UsageError where nothing is left.
    """
    found: dict[Path, tuple[int, str, Path]] = {}
    for number, root, path in _expand(paths):
        if path.is_file():
            found.setdefault(path.resolve(), (number, path.relative_to(root).as_posix(), path))
    files = []
    for number, name, path in sorted(found.values(), key=lambda entry: entry[:2]):
        state = path.stat()
        if state.st_size:
            full_name = f"{number}/{name}" if len(paths) > 1 else name
            files.append(_File(full_name, path, state.st_size, state.st_mtime_ns))
    if not files:
        raise UsageError(f"data.paths: {', '.join(paths) or 'the installed torch'} holds no text")
    return files


def _expand(paths: list[str]) -> Iterator[tuple[int, Path, Path]]:
    """(number of the path, folder that names are relative to, file) for files, folders and globs."""
    if not paths:
        package = Path(torch.__file__).parent
        for folder in _DEFAULT_FOLDERS:
            yield from ((0, package, path) for path in (package / folder).rglob("*.py"))
    for number, given in enumerate(paths):
        path = Path(given)
        if path.is_dir():
            yield from ((number, path, inner) for inner in path.rglob("*"))
        elif path.exists():
            yield number, path.parent, path
        else:
            root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
            yield from ((number, root, Path(match)) for match in glob.glob(given, recursive=True))


def split(files: list[_File], fraction: float) -> tuple[list[_File], list[_File]]:
    """Files to train on and files held out: about `fraction` of the bytes, chosen by the names' hashes.

    A file that is most of the text is never held out.
    """
    by_hash = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    total = sum(file.size for file in files)
    held_out: set[str] = set()
    taken = 0
    for file in by_hash:
        if taken < fraction * total and file.size <= total / 2 and len(held_out) < len(files) - 1:
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
        digest = hashlib.sha256()
        sizes = {}
        for name, pieces in _streams(files, fraction).items():
            with (aside / f"{name}.bin").open("wb") as output:
                for piece in pieces:
                    output.write(piece)
                    digest.update(piece)
                sizes[name] = output.tell()
            digest.update(sizes[name].to_bytes(8, "little"))
        index = {"sizes": sizes, "fingerprint": digest.hexdigest()[:16], "files": len(files)}
        (aside / "index.json").write_text(json.dumps(index))
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _streams(files: list[_File], fraction: float) -> dict[str, Iterable[bytes]]:
    """What goes into each part, piece by piece: files, or head and tail where they cannot be divided."""
    train, val = split(files, fraction)
    if val:
        return {"train": map(_read, train), "val": map(_read, val)}
    whole = b"".join(map(_read, files))
    at = max(0, len(whole) - max(_SHORTEST, round(len(whole) * fraction)))
    return {"train": [whole[:at]], "val": [whole[at:]]}


def _read(file: _File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise UsageError(f"data.paths: cannot read {file.path}: {error.strerror}") from None


def _is_whole(target: Path) -> bool:
    try:
        sizes = json.loads((target / "index.json").read_text())["sizes"]
        return all((target / f"{name}.bin").stat().st_size == sizes[name] for name in ("train", "val"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _open(target: Path) -> Prepared:
    index = json.loads((target / "index.json").read_text())
    for name, size in index["sizes"].items():
        if size < _SHORTEST:
            raise UsageError(
                f"data.paths: too little text: {sum(index['sizes'].values())} bytes leave {size} for the {name} part, "
                f"which needs {_SHORTEST}; give more text, or another data.val_fraction"
            )
    train, val = (np.memmap(target / f"{name}.bin", dtype=np.uint8, mode="r") for name in ("train", "val"))
    words = f"text: {index['files']} files, {len(train):,} bytes to train on, {len(val):,} held out"
    return Prepared(train, val, index["fingerprint"], words)


def trigram_loss(train: Bytes, val: Bytes) -> float:
    """Nats a byte of a trigram count model on `val`: what a model of text must beat.

    Each order is smoothed towards the one below with weight 5 (Jelinek-Mercer with Witten-Bell-like
    counts): p(c|ab) = (n(abc) + 5 p(c|b)) / (n(ab) + 5). Of long texts the first 64 MB are counted, 16 MB measured.
    """
    weight = 5.0
    train, val = train[:_COUNTED], val[: _COUNTED // 4]
    triples = np.zeros(1 << 24, dtype=np.int64)
    for start in range(0, len(train) - 2, _COUNTED // 8):  # in parts: numbers of 8 bytes each would need memory
        a, b, c = (train[start + i : min(start + _COUNTED // 8, len(train) - 2) + i].astype(np.int64) for i in range(3))
        triples += np.bincount((a * 256 + b) * 256 + c, minlength=1 << 24)
    ones = np.bincount(train, minlength=256).astype(np.float64)
    unigram = (ones + 1) / (ones.sum() + 256)
    seen = triples.reshape(-1, 256).sum(1)
    pairs = seen.reshape(256, 256).copy()
    pairs[train[-2], train[-1]] += 1  # the last pair begins no triple
    bigram = (pairs + weight * unigram) / (pairs.sum(1, keepdims=True) + weight)
    a, b, c = (val[i : len(val) - 2 + i].astype(np.int64) for i in range(3))
    probability = (triples[(a * 256 + b) * 256 + c] + weight * bigram[b, c]) / (seen[a * 256 + b] + weight)
    return float(-np.log(probability).mean())
