"""A folder of this machine as an archive, to be sent to hosts: code, not data."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from train.errors import UsageError

LEFT_OUT = frozenset({".git", ".hg", ".venv", "__pycache__", "runs", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
MOST_BYTES = 200 << 20


def pack(folder: Path, archive: Path) -> None:
    """Write the archive. Raises UsageError for what is no folder, and for one that holds data too."""
    if not folder.is_dir():
        raise UsageError(f"code: {folder} is no folder")
    files = []
    size = 0
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(names):
            path = Path(where, name)
            if path.is_file():
                files.append(path)
                size += path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(
            f"code: {folder} holds {size >> 20} MB, and more than {MOST_BYTES >> 20} are not sent: "
            "keep data elsewhere, and give it to containers by job_mounts"
        )
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        for path in files:
            packed.add(path, path.relative_to(folder))
