"""After the agents have ended: does this job go back into the queue, without which host, or what is its exit code?

Called by slurm/common.sh with the Python of the job's first host: standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.launch.slurm_facts import TOOL_S, is_own_disk, job_name, output
from train.seam import Exit
from train.slurm_lists import expand_hosts

MAX_RESTARTS = 100
MARK = "slurm-restart.json"
"""In the run folder: how far the run was when it last went back into the queue without a verdict."""
_UP = re.compile(r"(idle|mixed|allocated|completing|planned)[-+~#!%@^]?", re.IGNORECASE)
"""sinfo's states of nodes that run jobs, or will soon: `-` planned for another job, `~#!%` put to sleep or woken to
save power, `@^` to be booted. Not those with `*`, which do not answer, or `$`, kept for maintenance."""
_STRAY = re.compile(r"stopped by SIG(?:TERM|USR2)(?: at \S+)? before it began")
"""SIGTERM as the agent itself gets it, or as the script around it (`slurm.IN_STEP`) passes it on."""
_WORSE = ("OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "PREEMPTED")
"""sacct's states that say more than that something was killed."""


@dataclass(frozen=True)
class Decision:
    """What is to be done now."""

    requeue: bool
    exit_code: int
    words: str
    lost: str | None = None
    """A host that was lost."""


def decide(
    code: int,
    asked: str,
    verdict: Mapping[str, Any] | None,
    restarts: int,
    most: int = MAX_RESTARTS,
    *,
    got_on: bool = True,
    known: str = "",
) -> Decision:
    """Back into the queue, or not.

    Args:
        code: srun's exit code.
        asked: the last signal that this job's script got: TERM, USR2, USR1 or nothing.
        verdict: what the agents found, if it is of this start.
        restarts: how often Slurm has started this job again.
        most: how often it may.
        got_on: whether the run has a newer checkpoint than when it last ended without a verdict.
        known: what Slurm's accounting knows of such an end.
    """
    is_mute = has_no_verdict(code, verdict)
    code, cause, lost = _found(code, verdict)
    cause += f"; Slurm's accounting says {known}" if known else ""
    in_time = code == Exit.STOPPED_SAVED and (asked == "USR2" or " limit of " in cause)
    # A node that comes back is told to end the start that it missed, and that has the same number as this one.
    is_stray = code == Exit.STOPPED_UNSAVED and not asked and restarts > 0 and bool(_STRAY.fullmatch(cause))
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
    if is_mute and not got_on:
        return Decision(False, code, f"{why}, as the last time, and no newer checkpoint since: not started again")
    return Decision(True, code, f"{why}: back into the queue", lost if code == Exit.HOST_LOST else None)


def has_no_verdict(code: int, verdict: Mapping[str, Any] | None) -> bool:
    """Whether all that is known of a failure is srun's code: the first host's agent was killed."""
    return verdict is None and (code > 128 or code == Exit.HOST_LOST)


def _found(code: int, verdict: Mapping[str, Any] | None) -> tuple[int, str, str | None]:
    """The job's exit code, the cause in words, and the host that was lost."""
    if verdict:
        return int(verdict["exit_code"]), str(verdict.get("cause")), verdict.get("host")
    if code in (125, 126, 127):  # of a container's client, or a shell: nothing could be started
        return int(Exit.PREFLIGHT), "", None
    if has_no_verdict(code, verdict):
        return (
            int(Exit.HOST_LOST),
            f"the agent of the first host was killed, or did not start (srun's code was {code})",
            None,
        )
    return code, "", None


def fresh_verdict(folder: Path, since_s: float) -> dict[str, Any] | None:
    """The verdict in a run folder, where it is of this start."""
    file = folder / "verdict.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_mtime >= since_s else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("exit_code"), int) else None


def saved_step(folder: Path) -> int:
    """Step of the newest checkpoint in a run folder; -1: none."""
    steps = [path.name.rpartition("-")[2] for path in folder.glob("checkpoints/step-*") if path.is_dir()]
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def got_on(folder: Path, job: str) -> bool:
    """Whether this is the first end of this job without a verdict, or there is a newer checkpoint than at the last."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return bool(mark["job"] != job or saved_step(folder) > mark["saved_step"])
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def note(folder: Path, job: str) -> bool:
    """Note how far the run is. False where that cannot be: then it cannot be told next time whether it got on."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(json.dumps({"job": job, "saved_step": saved_step(folder)}), encoding="utf-8")
        return True
    return False


def known_to_accounting(job: str, timeout_s: float = TOOL_S) -> str:
    """What sacct says of this start's steps, where that is more than a code; nothing where there is no accounting."""
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = ends_s - time.monotonic()
        format_ = "--format=JobID,State,NodeList"
        rows = output("sacct", f"--jobs={job}", "--noheader", "--parsable2", format_, timeout_s=max(left_s, 0.1))
        states = [row.split("|") for row in rows.splitlines() if row.count("|") == 2]
        # The step has ended, but the news takes a moment to come there.
        is_behind = any(state.startswith("RUNNING") for name, state, _ in states if re.search(r"\.\d+$", name))
        if not is_behind or left_s < 1:
            break
        time.sleep(0.5)
    return ", ".join(
        f"{state} of {name} on {nodes}" for name, state, nodes in states if state.partition(" ")[0] in _WORSE
    )


def can_do_without(without: str, hosts: int, with_gpus: bool, nodes: str, *, reserved: bool = False) -> bool:
    """Whether as many other nodes of the partition are up; a job that excludes too many waits for ever.

    Args:
        without: the nodes to do without, with commas between.
        hosts: how many the job needs.
        with_gpus: whether each must have GPUs.
        nodes: `sinfo --Node --format='%N %T %G'` of its partition.
        reserved: whether it may run on nodes of a reservation.
    """
    rows = [row for row in map(str.split, nodes.splitlines()) if len(row) == 3 and ("gpu" in row[2] or not with_gpus)]
    fit = {row[0] for row in rows if _UP.fullmatch(row[1]) or (reserved and row[1].lower() == "reserved")}
    return len(fit - set(without.split(","))) >= hosts


def excluded(shown: str, lost: str) -> str:
    """The job's list of excluded nodes, and one more."""
    found = re.search(r"\bExcNodeList=(\S+)", shown)
    before = [] if found is None or found[1] == "(null)" else expand_hosts(found[1])
    return ",".join(dict.fromkeys([*before, lost]))


def _say(words: str) -> None:
    print(f"muster: {words}", file=sys.stderr)


def judge(code: int, asked: str, since_s: float, env: Mapping[str, str]) -> Decision:
    """The decision on this job, by what is in its run folder; said, and noted there."""
    folder, job = Path(env["MUSTER_RUNS_DIR"], env["MUSTER_RUN_ID"]), job_name(env)
    verdict = fresh_verdict(folder, since_s)
    is_mute = has_no_verdict(code, verdict)
    most = int(env.get("MUSTER_MAX_RESTARTS") or MAX_RESTARTS)
    made = decide(
        code, asked, verdict, int(env.get("SLURM_RESTART_COUNT") or 0), most,
        got_on=got_on(folder, job), known=known_to_accounting(job) if is_mute and asked != "TERM" else "",
    )  # fmt: skip
    if made.requeue and is_mute and not note(folder, job):
        words = f"the agent of the first host left no verdict, and {folder} cannot be written: not started again"
        made = Decision(False, made.exit_code, words)
    elif made.exit_code == Exit.STOPPED_SAVED:
        with contextlib.suppress(OSError):  # it got on: also a script of whose checkpoints nothing is known
            (folder / MARK).unlink()
    _say(made.words)
    return made


def _nodes(env: Mapping[str, str], lost: str | None) -> tuple[str, str]:
    """Nodes to do without, and those to have again, with commas between; or -."""
    names = expand_hosts(env["SLURM_JOB_NODELIST"])
    without, kept = "-", "-"
    if is_own_disk(env["MUSTER_RUNS_DIR"]) and len(names) > 1:
        kept = ",".join(name for name in names if name != lost)
        _say(f"on {kept} again: that is where the run folder is")
    if lost not in names:
        return without, kept
    nodes = output("sinfo", "--noheader", "--Node", f"--partition={env['SLURM_JOB_PARTITION']}", "--format=%N %T %G")
    fewer = excluded(output("scontrol", "show", "job", job_name(env)), str(lost))
    reserved = bool(env.get("SLURM_JOB_RESERVATION"))
    if not can_do_without(fewer, len(names), bool(env.get("SLURM_GPUS_ON_NODE")), nodes, reserved=reserved):
        _say(f"too few nodes are up without {lost}: it waits for that to return")
        return without, kept
    _say(f"without {lost}")
    return fewer, kept


def main(argv: Sequence[str]) -> int:
    """`CODE ASKED SINCE`: print `end CODE`, or `requeue CODE WITHOUT WITH` (nodes, or -); reasons go to stderr."""
    made = judge(int(argv[0]), argv[1], float(argv[2]), os.environ)
    nodes = _nodes(os.environ, made.lost) if made.requeue else ()
    print("requeue" if made.requeue else "end", made.exit_code, *nodes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
