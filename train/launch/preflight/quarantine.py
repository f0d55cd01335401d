"""Hosts that were found bad, in a file for people and launchers: a line each, `NAME  DATE  WHY`."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.errors import UsageError

HEAD = (
    "# Hosts that a preflight found bad. Launchers told of this file leave them out; remove a line to take one back.\n"
)


def quarantined(path: Path) -> dict[str, str]:
    """Names, and since when and why. No file: nobody. Raises UsageError for what cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError) as error:
        raise UsageError(f"quarantine: {path} cannot be read: {error}") from None
    rows = (line.split(None, 1) for line in lines if line.strip() and not line.startswith("#"))
    return {row[0]: row[1].strip() if len(row) > 1 else "" for row in rows}


def add(path: Path, bad: Mapping[str, str]) -> list[str]:
    """Add hosts; those that were not in it yet. Several may do so at once. Raises UsageError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        new = [name for name in bad if name not in quarantined(path)]
        if file.tell() == 0 and new:
            file.write(HEAD)
        when = time.strftime("%F %T")
        file.writelines(f"{name}  {when}  {' '.join(bad[name].split())}\n" for name in new)
    return new


def left(names: Sequence[str], file: str) -> tuple[list[str], list[str]]:
    """The hosts that a quarantine leaves, in their order, and words on those that it does not. Raises UsageError."""
    if not file:
        return list(names), []
    path = Path(file).expanduser()
    if not path.exists():
        raise UsageError(f"quarantine: there is no file {file}; a preflight makes it: --quarantine {file}")
    bad = quarantined(path)
    rest = [name for name in names if name not in bad]
    if names and not rest:
        raise UsageError(f"quarantine: all of {', '.join(names)} are in {file}: remove those that are well again")
    return rest, [f"{name} is left out, in quarantine since {bad[name]}" for name in names if name in bad]
