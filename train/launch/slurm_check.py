"""Is each host of a Slurm job fit? One task a host tells what it finds; the job's first host judges them together.

Called by slurm/common.sh with the Python of the hosts: standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.seam import Exit
from train.slurm_lists import expand_hosts

SKEW_S, SKEW_REFUSED_S = 2.0, 60.0
"""Logs are hard to compare, and munge does without a credential that seems to come from the future or be too old."""
FREE_MB = 1024
TOOL_S, ASK_S = 20.0, 120.0
"""How long a tool may take to answer, as nvidia-smi where a GPU is ill; and all hosts together."""


def found_here(env: Mapping[str, str]) -> dict[str, Any]:
    """What this host is like, told by a task of the job."""
    runs = Path(env["MUSTER_RUNS_DIR"])
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told: dict[str, Any] = {
        "node": env.get("SLURMD_NODENAME") or socket.gethostname(), "cpus": len(os.sched_getaffinity(0)),
        "memlock_mb": None if memlock == resource.RLIM_INFINITY else memlock >> 20,
        "shm_mb": shutil.disk_usage("/dev/shm").total >> 20,  # noqa: S108
        "gpus_given": int(env.get("SLURM_GPUS_ON_NODE") or 0), "gpus_seen": None, "runs": None, "mute": [],
    }  # fmt: skip
    if shutil.which("nvidia-smi"):
        told["gpus_seen"] = _said(told["mute"], "nvidia-smi", "--list-gpus").count("GPU ")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if not os.access(runs, os.W_OK):
            raise PermissionError(13, "it cannot be written")
        told["free_mb"] = shutil.disk_usage(runs).free >> 20
    except OSError as error:
        told["runs"] = error.strerror
    told["credential"] = _said(told["mute"], "munge", "--no-input") if shutil.which("munge") else ""
    told["time"] = time.time()
    return told


def problems_of(told: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What makes a host unfit, and what is only worth knowing.

    Args:
        told: `found_here` of it, with `ahead_s` (its clock, against the first host's) and unmunge's words.
        asked: `cpus` and `device` of the job.
    """
    bad = [f"{tool} did not answer within {TOOL_S:g} s: run it there by hand" for tool in told["mute"]]
    notes: list[str] = []
    if abs(told["ahead_s"]) > SKEW_S:
        words = f"its clock is {abs(told['ahead_s']):.0f} s {'ahead' if told['ahead_s'] > 0 else 'behind'}: run chrony"
        (bad if abs(told["ahead_s"]) > SKEW_REFUSED_S else notes).append(words)
    if told["credential"] not in ("", "Success"):
        bad.append(f"munge: {told['credential']}: give all hosts the same /etc/munge/munge.key, and restart munge")
    if told["runs"]:
        bad.append(f"the run folder: {told['runs']}: set MUSTER_RUNS_DIR to one that can be written on all hosts")
    elif told["free_mb"] < FREE_MB:
        bad.append(f"the run folder's disk has {told['free_mb']} MB free; checkpoints need more than {FREE_MB}")
    if told["cpus"] < asked["cpus"]:
        bad.append(f"it lets the job use {told['cpus']} cores, not the {asked['cpus']} that it was given")
    if asked["device"] == "cuda" and told["gpus_seen"] != told["gpus_given"] and "nvidia-smi" not in told["mute"]:
        seen = "there is no nvidia-smi" if told["gpus_seen"] is None else f"the driver shows {told['gpus_seen']}"
        bad.append(f"Slurm gave it {told['gpus_given']} GPUs, but {seen}: look at the driver, or set MUSTER_DEVICE=cpu")
    if told["memlock_mb"] is not None and told["memlock_mb"] < 1024:
        notes.append(
            f"locked memory is limited to {told['memlock_mb']} MB: LimitMEMLOCK=infinity for slurmd (RDMA, NCCL)"
        )
    if told["shm_mb"] < 512:
        notes.append(f"shared memory is {told['shm_mb']} MB: little for loader workers and NCCL")
    return bad, notes


def judge(rows: Sequence[Mapping[str, Any]], silent: Sequence[str], asked: Mapping[str, Any]) -> list[str]:
    """Print what is worth knowing; all problems of all hosts.

    Args:
        rows: what each host told.
        silent: hosts that could not be asked.
        asked: `cpus` and `device` of the job.
    """
    problems = [
        f"{name}: Slurm could not start the check there, or it did not end: is slurmd well, are clock and munge's key "
        "those of the others, does the disk of the run folder answer?"
        for name in silent
    ]
    for told in rows:
        bad, notes = problems_of(told, asked)
        problems += [f"{told['node']}: {problem}" for problem in bad]
        print(
            f"muster: {told['node']}: {told['cpus']} cores, {told['gpus_given']} GPUs, clock {told['ahead_s']:+.1f} s, "
            f"shared memory {told['shm_mb']} MB, {told.get('free_mb', '?')} MB free for runs",
            *(f"muster: {told['node']}: note: {note}" for note in notes), sep="\n", flush=True,
        )  # fmt: skip
    return problems


def ask_all(names: Sequence[str], cpus: int, timeout_s: float = ASK_S) -> tuple[list[dict[str, Any]], list[str]]:
    """`found_here` of each host that answers, with its clock against ours and its credential read here; the others."""
    hosts = len(names)
    words = [
        "srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}",
        "--export=ALL", "--mpi=none", "--wait=30", os.environ.get("MUSTER_PYTHON") or "python3", "-m", __spec__.name,
    ]  # fmt: skip
    rows = []
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen([*words, "here"], stdout=subprocess.PIPE, stderr=said, text=True) as step,  # noqa: S603
    ):
        late = threading.Timer(timeout_s, _end, [step])
        late.start()
        assert step.stdout is not None
        for line in step.stdout:
            told = _row(line)
            if told is None:  # of a prolog, a module's greeting
                sys.stderr.write(line)
            else:
                rows.append(told)
        step.wait()
        late.cancel()
        said.seek(0)
        errors = said.read()
    sys.stderr.write(errors)
    # Where one host cannot be reached, srun ends the step on the others before they answer: they are not to blame.
    to_blame = re.findall(r"launch for StepId=\S+ failed on node ([^:\s]+)", errors)
    answered = {told["node"] for told in rows}
    return rows, [name for name in names if name not in answered and (name in to_blame or not to_blame)]


def _row(line: str) -> dict[str, Any] | None:
    """What a host told in a line, with its clock against ours, its credential read here; None: it is no such line."""
    came_s = time.time()
    try:
        told = json.loads(line)
        told["ahead_s"] = told["time"] - came_s
        told["credential"] = _unmunged(told["credential"])
    except (ValueError, TypeError, KeyError):
        return None
    return dict(told)


def _end(step: subprocess.Popen[str]) -> None:
    """srun ends its step at SIGTERM; where that hangs, too, the job's end will end it."""
    step.terminate()
    try:
        step.wait(5)
    except subprocess.TimeoutExpired:
        step.kill()


def _unmunged(credential: str) -> str:
    """What unmunge says of a credential: `Success`, or why not. Nothing where there is no munge."""
    if not credential or not shutil.which("unmunge"):
        return ""
    try:
        words = ["unmunge"]
        done = subprocess.run(words, input=credential, capture_output=True, text=True, check=False, timeout=TOOL_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return "no answer"
    status = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("STATUS", "unmunge:"))]
    return "Success" if done.returncode == 0 else status[0].partition(":")[2].strip() if status else "no answer"


def _said(mute: list[str], *words: str) -> str:
    """What a tool prints; one that does not answer is added to `mute`."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=TOOL_S).stdout  # noqa: S603
    except subprocess.TimeoutExpired:
        mute.append(words[0])
        return ""


def main(argv: Sequence[str]) -> int:
    """On each host `here`; on the first one, judge all: 0, or 3 with every problem named."""
    if argv == ["here"]:
        print(json.dumps(found_here(os.environ)), flush=True)
        return 0
    env = os.environ
    names, cpus = expand_hosts(env["SLURM_JOB_NODELIST"]), int(env.get("SLURM_CPUS_PER_TASK") or 1)
    device = env.get("MUSTER_DEVICE") or ("cuda" if env.get("SLURM_GPUS_ON_NODE") else "cpu")
    problems = judge(*ask_all(names, cpus), {"cpus": cpus, "device": device})
    if problems:
        print("muster: not fit:", *(f"  {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return int(Exit.PREFLIGHT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
