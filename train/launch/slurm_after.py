"""After the agents have ended: does this job go back into the queue, without which host, or what is its exit code?

Called by slurm/common.sh with the Python of the job's first host: standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.launch.slurm import is_own_disk, job_name
from train.seam import Exit
from train.slurm_lists import expand_hosts

MAX_RESTARTS = 100
_UP = re.compile(r"(idle|mixed|allocated|completing|reserved)[+$@^-]*", re.IGNORECASE)


@dataclass(frozen=True)
class Decision:
    """What is to be done now."""

    requeue: bool
    exit_code: int
    words: str
    lost: str | None = None
    """A host that was lost."""


def decide(
    code: int, asked: str, verdict: Mapping[str, Any] | None, restarts: int, most: int = MAX_RESTARTS
) -> Decision:
    """Back into the queue, or not.

    Args:
        code: srun's exit code.
        asked: the last signal that this job's script got: TERM, USR2 or nothing.
        verdict: what the agents found, if it is of this start.
        restarts: how often Slurm has started this job again.
        most: how often it may.
    """
    code = int(verdict["exit_code"]) if verdict else code
    cause, lost = (str(verdict.get("cause")), verdict.get("host")) if verdict else ("", None)
    if verdict is None and code in (125, 126, 127):  # of a container's client, or a shell: nothing could be started
        code = int(Exit.PREFLIGHT)
    elif verdict is None and code > 128:
        code, cause = int(Exit.HOST_LOST), f"the agent of the first host was killed (srun's code was {code})"
    in_time = code == Exit.STOPPED_SAVED and (asked == "USR2" or " limit of " in cause)
    # A node that comes back is told to end the start that it missed, and that has the same number as this one.
    is_stray = code == Exit.STOPPED_UNSAVED and not asked and restarts > 0 and cause.endswith(" before it began")
    if asked == "TERM":
        what = "all is saved" if code == Exit.STOPPED_SAVED else cause or f"exit code {code}"
        return Decision(False, code, f"cancelled or preempted, {what}: whether it starts again is for Slurm to say")
    if asked == "USR1" or (not in_time and not is_stray and code != Exit.HOST_LOST):
        return Decision(False, code, f"exit code {code}" + (": not started again" if code else ""))
    why = "the time is nearly up, and all is saved" if in_time else cause
    if restarts >= most:
        return Decision(
            False, code, f"{why}; but it was started again {restarts} times already (MUSTER_MAX_RESTARTS={most})"
        )
    return Decision(True, code, f"{why}: back into the queue", lost if code == Exit.HOST_LOST else None)


def fresh_verdict(folder: Path, since_s: float) -> dict[str, Any] | None:
    """The verdict in a run folder, where it is of this start."""
    file = folder / "verdict.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_mtime >= since_s else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("exit_code"), int) else None


def can_do_without(without: str, hosts: int, with_gpus: bool, nodes: str) -> bool:
    """Whether as many other nodes of the partition are up; a job that excludes too many waits for ever.

    Args:
        without: the nodes to do without, with commas between.
        hosts: how many the job needs.
        with_gpus: whether each must have GPUs.
        nodes: `sinfo --Node --format='%N %T %G'` of its partition.
    """
    rows = [line.split() for line in nodes.splitlines()]
    fit = {row[0] for row in rows if len(row) == 3 and _UP.fullmatch(row[1]) and ("gpu" in row[2] or not with_gpus)}
    return len(fit - set(without.split(","))) >= hosts


def excluded(shown: str, lost: str) -> str:
    """The job's list of excluded nodes, and one more."""
    found = re.search(r"\bExcNodeList=(\S+)", shown)
    before = [] if found is None or found[1] == "(null)" else expand_hosts(found[1])
    return ",".join(dict.fromkeys([*before, lost]))


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout  # noqa: S603


def main(argv: Sequence[str]) -> int:
    """`CODE ASKED SINCE`: print `end CODE`, or `requeue WITHOUT WITH` (nodes, or -); the reason goes to stderr."""
    code, asked, since_s = int(argv[0]), argv[1], float(argv[2])
    env = os.environ
    verdict = fresh_verdict(Path(env["MUSTER_RUNS_DIR"], env["MUSTER_RUN_ID"]), since_s)
    most = env.get("MUSTER_MAX_RESTARTS") or str(MAX_RESTARTS)
    made = decide(code, asked, verdict, int(env.get("SLURM_RESTART_COUNT") or 0), int(most))
    print(f"muster: {made.words}", file=sys.stderr)
    if not made.requeue:
        print(f"end {made.exit_code}")
        return 0
    names = expand_hosts(env["SLURM_JOB_NODELIST"])
    without, kept = "-", "-"
    if is_own_disk(env["MUSTER_RUNS_DIR"]) and len(names) > 1:
        kept = ",".join(name for name in names if name != made.lost)
        print(f"muster: on {kept} again: that is where the run folder is", file=sys.stderr)
    if made.lost in names:
        nodes = _output(
            "sinfo", "--noheader", "--Node", f"--partition={env['SLURM_JOB_PARTITION']}", "--format=%N %T %G"
        )
        fewer = excluded(_output("scontrol", "show", "job", job_name(env)), str(made.lost))
        if can_do_without(fewer, len(names), bool(env.get("SLURM_GPUS_ON_NODE")), nodes):
            without = fewer
            print(f"muster: without {made.lost}", file=sys.stderr)
        else:
            print(f"muster: too few nodes are up without {made.lost}: it waits for that to return", file=sys.stderr)
    print(f"requeue {without} {kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
