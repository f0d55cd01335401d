"""A folder of this machine as an archive, to be sent to hosts: code, not data."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from train.errors import UsageError

LEFT_OUT = frozenset({".git", ".hg", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
RUNS, OF_A_RUN = "runs", ("plan.json", "events.jsonl", "metrics.jsonl", "verdict.json")
MOST_BYTES = 200 << 20


@dataclass
class _Found:
    """What is to be packed, by names within the folder."""

    root: Path
    files: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """Of which each leads to another name within the folder, as seen from where it is."""
    left_out: list[str] = field(default_factory=list)
    bytes: int = 0

    def take(self, path: Path) -> None:
        """A file, or a link; what else there is (sockets, pipes) is none of code."""
        name = str(path.relative_to(self.root))
        target = Path(os.path.realpath(path))  # resolve() would raise where links lead round in a circle
        if path.is_symlink() and self._is_within(target):
            self.links[name] = os.path.relpath(target, path.parent)
        elif path.is_file():  # what a link leads to outside is sent in its place
            self.files.append(name)
            self.bytes += path.stat().st_size
        elif path.is_symlink():
            what = "a folder outside" if path.exists() else "nothing"
            self.left_out.append(f"{name} (a link to {what}: {path.readlink()})")

    def _is_within(self, target: Path) -> bool:
        """Whether it comes along."""
        if not (target.exists() and target.is_relative_to(self.root)):
            return False
        inner = target.relative_to(self.root).parts
        return not LEFT_OUT.intersection(inner) and not (inner[:1] == (RUNS,) and _has_runs(self.root / RUNS))


def pack(folder: Path, archive: Path) -> list[str]:
    """Write the archive; what is left out of it, for people.

    A link to somewhere within the folder stays a link, so that loops do no harm.

    Raises:
        UsageError: it is no folder, or holds data too.
    """
    if not folder.is_dir():
        raise UsageError(f"code: {folder} is no folder")
    found = _found(folder.resolve())
    if found.bytes > MOST_BYTES:
        raise UsageError(
            f"code: {folder} holds {found.bytes >> 20} MB, and more than {MOST_BYTES >> 20} are not sent: "
            "keep data elsewhere, and give it to containers by job_mounts"
        )
    with tarfile.open(archive, "w:gz", compresslevel=1, dereference=True) as packed:
        for name in found.files:
            packed.add(found.root / name, name)
        for name, target in found.links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            packed.addfile(link)
    return found.left_out


def _found(root: Path) -> _Found:
    found, names_left_out = _Found(root), set()
    for where, folders, names in os.walk(root):
        here = Path(where)
        kept = []
        for name in sorted(folders):
            if name in LEFT_OUT:
                names_left_out.add(name)
            elif (here / name).is_symlink():
                found.take(here / name)
            elif here == root and name == RUNS and _has_runs(here / name):
                found.left_out.append(f"{RUNS} (results of runs)")
            else:
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            found.take(here / name)
    found.left_out = sorted(found.left_out) + sorted(names_left_out)
    return found


def _has_runs(folder: Path) -> bool:
    """Whether results of runs are there, and not a package that happens to have the name."""
    return any((run / name).exists() for run in folder.glob("*/") for name in OF_A_RUN)
