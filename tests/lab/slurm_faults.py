"""What can happen to a job under Slurm, and how a start of it may end by that."""

from __future__ import annotations

import random

from tests.lab.slurms import NODES, Slurm

RANK, AGENT = "^/opt/muster/venv/bin/python.* -m train run", "^/opt/muster/venv/bin/python.* -m train node"
KILL = ("sh", "-c", 'until pkill --signal KILL --full "$@"; do sleep 0.1; done', "kill")
RESTARTED, UNSAVED = "RESTARTED", "FAILED 8:0"
LOST = {RESTARTED, "FAILED 7:0", "FAILED 4:0"}
"""Twice without a newer checkpoint between is the end; and so is a host that is lost before it joined."""
FAULTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "kill -9 of a rank": ((*KILL, "--newest", RANK), {"FAILED 5:0"}),
    "kill -9 of an agent": ((*KILL, AGENT), LOST),
    "kill -9 of all on a host": ((*KILL, f"{RANK}|{AGENT}"), LOST),
    "USR2": (("scancel", "--batch", "--signal=USR2"), {RESTARTED, UNSAVED}),
    "USR1": (("scancel", "--batch", "--signal=USR1"), {"FAILED 75:0", UNSAVED}),
    "requeue": (("scontrol", "requeue"), {RESTARTED}),
    "cancel": (("scancel",), {"CANCELLED 75:0", "CANCELLED 8:0", "CANCELLED 0:15"}),
    "preemption": (
        ("sh", "-c", "sbatch --partition=urgent -N2 --gpus-per-node=2 -o /dev/null --wrap='sleep 1'", "for"),
        {RESTARTED},
    ),
}
"""What happens, and how a start may end by that."""


def deal(slurm: Slurm, job: str, fault: str, dice: random.Random) -> str:
    """Do it to a job; how that start ended."""
    restarts = slurm.facts(job)["Restarts"]
    argv, ends = FAULTS[fault]
    where = dice.choice(NODES[:2]) if fault.startswith("kill") else "head"
    slurm.cluster.on(where, *argv, *([] if where != "head" else [job]))  # and the command itself succeeds
    state = slurm.end(job, 300, restarts)
    ended = state if state == RESTARTED else f"{state} {slurm.facts(job)['ExitCode']}"
    assert ended in ends, f"{fault} on {where} ended with {ended}, not one of {sorted(ends)}\n{slurm.log(job)}"
    return ended
