"""Whether the kernel ended a process for want of memory: its own count, from the process's control group."""

from __future__ import annotations

import re
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/unified"))
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def counters(pid: int) -> list[Path]:
    """The files that count out-of-memory kills in the control groups of a process, innermost first.

    `memory.events` in version 2, `memory.oom_control` in version 1 of the interface
    (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst in the kernel's source).
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"
        # In a container the path may be the host's, while what is mounted begins at the container's own group.
        for inner in (path.lstrip("/"), ""):
            found += [root / inner / name for root in _ROOTS if (root / inner / name).exists()]
    return list(dict.fromkeys(found))


def kills(files: list[Path]) -> int:
    """Kills counted so far, in all of them together; 0 where it cannot be read."""
    total = 0
    for path in files:
        try:
            match = _COUNT.search(path.read_text())
        except OSError:
            continue
        total += int(match[1]) if match else 0
    return total
