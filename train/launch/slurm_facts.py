"""What Slurm and a host tell of a job: its hosts' GPUs, its end, its signal before that.

Standard library only, Python 3.9.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence

from train.slurm_lists import expand_hosts

TOOL_S = 10.0
"""How long a tool may take to answer: where slurmctld, slurmdbd or a file system is down they wait for minutes."""


def output(*words: str, timeout_s: float = TOOL_S) -> str:
    """What a tool prints; nothing where there is none, or it does not answer in time."""
    try:
        return subprocess.run(  # noqa: S603
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def job_name(env: Mapping[str, str]) -> str:
    """How to call this very job: a task of an array by both numbers, for its own one may mean the whole array."""
    array = env.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}" if array else env.get("SLURM_JOB_ID", "")


def gpus_of(names: Sequence[str], env: Mapping[str, str], shown: str) -> list[int]:
    """GPUs of the job on each host: `SLURM_GPUS_ON_NODE` is that of the first one alone, so Slurm is asked."""
    if not env.get("SLURM_GPUS_ON_NODE"):
        return [0] * len(names)
    found: dict[str, int] = {}
    for nodes, gres in re.findall(r"^\s*Nodes=(\S+) .*\bGRES=(\S*)", shown, re.MULTILINE):
        count = sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)??:(\d+)", gres))
        found.update(dict.fromkeys(expand_hosts(nodes), count))
    default = int(env["SLURM_GPUS_ON_NODE"])
    return [found.get(name, default) for name in names]


def end_of(env: Mapping[str, str], shown: str) -> float | None:
    """When the job's time is up, since 1970; older Slurms tell it only when asked."""
    if env.get("SLURM_JOB_END_TIME"):
        return float(env["SLURM_JOB_END_TIME"])
    found = re.search(r"\bTimeLimit=(\S+)[\s\S]*?\bEndTime=(\d\S+)", shown)
    if found is None or found[1] in ("UNLIMITED", "INFINITE"):
        return None
    return time.mktime(time.strptime(found[2], "%Y-%m-%dT%H:%M:%S"))


def lead_of(env: Mapping[str, str], script: str) -> int | None:
    """Seconds before the time limit at which the batch script is signalled, as far as that can be seen.

    What was said on sbatch's command line is told to nobody: this is what stands in the environment or the script.

    Args:
        env: of the batch script.
        script: its text.
    """
    found = re.search(r"^#SBATCH\s+--signal[= ](\S+)", script, re.MULTILINE)
    value = env.get("SBATCH_SIGNAL") or (found[1] if found else "")
    lead = re.fullmatch(r"\S*?USR2@(\d+)", value)
    return int(lead[1]) if lead else None


def is_own_disk(folder: str) -> bool:
    """Whether a folder is of a kind of file system that hosts do not share."""
    kind = output("stat", "--file-system", "--format=%T", folder).strip()
    return kind in ("ext2/ext3", "xfs", "btrfs", "zfs", "tmpfs", "overlayfs", "f2fs")
