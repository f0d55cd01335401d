"""What is new in a run's folder on a host comes to this machine, by whatever runs a command there.

Needs tar and find on the host, and no rsync. Small files come many at a time, large ones piece by piece; each is put in
its place whole. What has the same size and time here already stays.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

BATCH_BYTES, PIECE_BYTES = 8 << 20, 8 << 20
OTHERS = re.compile(r"(logs|evidence|samples)/")
"""What hosts have beside the one whose folder is taken as a whole."""

Read = Callable[[str, bytes], bytes]
"""What a command writes on the host, given this on its standard input."""


class File(NamedTuple):
    """A file of the run on the host."""

    name: str
    size: int
    time_s: float


class Brought(NamedTuple):
    """What came."""

    dest: Path
    files: list[File]


def bring(
    read: Read, run: str, launch: str, results: Path, label: str, *, whole: bool, checkpoints: bool = True
) -> Brought:
    """Bring a run, and the console of a launch, from a host. Raises ValueError, OSError, and what `read` raises.

    Args:
        read: runs a command on the host.
        run: the run folder there.
        launch: the launch's folder there.
        results: the folder here for all runs.
        label: what the host's logs are called.
        whole: all of it, or logs alone.
        checkpoints: these too.
    """
    name = PurePosixPath(run).name
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", ".."):
        raise ValueError(f"{run!r} is no run folder")
    dest = results / name

    def is_wanted(file: File) -> bool:
        if not whole:
            return OTHERS.match(file.name) is not None
        return checkpoints or not file.name.startswith("checkpoints/")

    files = _bring(read, run, dest, is_wanted)
    files += _bring(read, launch, dest / "logs" / label, lambda file: file.name == "console")
    return Brought(dest, files)


def _bring(read: Read, source: str, dest: Path, is_wanted: Callable[[File], bool]) -> list[File]:
    files = [file for file in _files(read, source) if is_wanted(file) and not _is_here(file, dest)]
    batch: list[File] = []
    for file in sorted(files, key=lambda file: file.size):
        if file.size > BATCH_BYTES:
            _bring_large(read, source, file, dest)
            continue
        if sum(one.size for one in batch) + file.size > BATCH_BYTES:
            _bring_batch(read, source, batch, dest)
            batch = []
        batch.append(file)
    _bring_batch(read, source, batch, dest)
    return files


def _files(read: Read, source: str) -> list[File]:
    find = f"cd {shlex.quote(source)} && find . -type f ! -name '.*' -printf '%s %T@ %P\\0'"
    rows = read(find, b"").decode("utf-8", "surrogateescape").split("\0")
    found = []
    for row in rows[:-1]:
        size, time_s, name = row.split(" ", 2)
        if ".." not in PurePosixPath(name).parts and not name.startswith("/"):
            found.append(File(name, int(size), float(time_s)))
    return found


def _bring_batch(read: Read, source: str, batch: list[File], dest: Path) -> None:
    if not batch:
        return
    names = "".join(f"{file.name}\0" for file in batch).encode("utf-8", "surrogateescape")
    # 1: a file changed meanwhile, or went; what came of it is looked at again next time.
    command = f"cd {shlex.quote(source)} && {{ tar -cf - --null --no-recursion -T - 2>/dev/null || [ $? -le 2 ]; }}"
    by_name = {file.name: file for file in batch}
    with tarfile.open(fileobj=io.BytesIO(read(command, names))) as archive:
        for member in archive:
            file, content = by_name.get(member.name.removeprefix("./")), archive.extractfile(member)
            if file is not None and content is not None:
                with _Place(file, dest) as place:
                    place.write(content.read())


def _bring_large(read: Read, source: str, file: File, dest: Path) -> None:
    path = shlex.quote(f"{source}/{file.name}")
    with _Place(file, dest) as place:
        for at in range(0, file.size, PIECE_BYTES):
            place.write(read(f"dd if={path} bs={PIECE_BYTES} skip={at // PIECE_BYTES} count=1 2>/dev/null", b""))


class _Place:
    """Where a file comes to be: under another name until it is whole, then with the host's time."""

    def __init__(self, file: File, dest: Path) -> None:
        self._file, self._path = file, dest / file.name
        self._aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")

    def __enter__(self) -> io.BufferedWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = self._aside.open("wb")
        return self._writer

    def __exit__(self, kind: object, *more: object) -> None:
        self._writer.close()
        if kind is not None:
            self._aside.unlink()
            return
        os.utime(self._aside, (self._file.time_s, self._file.time_s))
        self._aside.replace(self._path)


def _is_here(file: File, dest: Path) -> bool:
    try:
        found = (dest / file.name).stat()
    except OSError:
        return False
    return found.st_size == file.size and abs(found.st_mtime - file.time_s) < 0.01
