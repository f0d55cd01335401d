"""Slurm's two shorthands: lists of hosts and of counts. Read nothing of the environment; both planes use them."""

from __future__ import annotations

import re
import shutil
import subprocess

from train.errors import UsageError

_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<times>\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """Hosts of a list in its order: `rack[1-2]node[08,3]` is rack1node08, rack1node3, rack2node08, rack2node3.

    By Slurm's own scontrol where that is at hand, else by python-hostlist. Raises UsageError.
    """
    if text and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", text]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if shown.returncode == 0 and shown.stdout.strip():
            return shown.stdout.split()
    from hostlist import BadHostlist, expand_hostlist

    try:
        hosts = [str(host) for host in expand_hostlist(text, sort=False)]
    except BadHostlist:
        hosts = []
    if not hosts:
        raise UsageError(f"Slurm's host list {text!r} cannot be read")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Counts per node: `2(x3),1` is 2, 2, 2, 1 (srun(1), SLURM_TASKS_PER_NODE). Raises UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"Slurm's list of counts {text!r} cannot be read: expected such as 2(x3),1")
        counts += [int(found["count"])] * int(found["times"] or 1)
    return counts
