"""Files that outlive a power cut, and what a disk's errors mean, in words. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any


def hash_of_file(path: Path) -> dict[str, Any]:
    """SHA-256 and size of a file. Raises OSError."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_name(folder: Path) -> None:
    """Wait until a new folder is on the disk by its name, and the folders above it, of which some may be new too."""
    above, *higher = folder.absolute().parents
    sync(above)
    for path in higher:
        with contextlib.suppress(OSError):  # one that this user may not read is none that was made for the run
            sync(path)


def need_room(folder: Path, size: int) -> None:
    """Raise OSError(ENOSPC) before anything is written that would not fit."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(errno.ENOSPC, f"it takes {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free")


def is_gone(path: Path) -> bool:
    """Whether it is certain that nothing is there; False where that cannot be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def in_words(error: BaseException) -> str:
    """Why a file could not be written or read: what was found, and the fix where there is one."""
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


def _owner_of(path: Path) -> str:
    """`, which belongs to user 0`: of the nearest folder that can be looked at."""
    for place in (path, *path.parents):
        try:
            return f" ({place if place != path else 'it'} belongs to user {place.stat().st_uid})"
        except OSError:
            continue
    return ""
