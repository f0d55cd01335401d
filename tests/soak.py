"""`make soak`: the same fault a hundred times. A rank is killed; does anything stay behind, and how long does it take?

python -m tests.soak [REPETITIONS]
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time

from tests.hosts import Job, Lab, hosts, why_not
from tests.lab.faults import PLAIN, STUCK, script

REPETITIONS = 100
WITH_TORCH_EVERY = 10
SETTLED_S = 3.0
"""So long after the last agent's end nothing may be left. It counts as left behind then, and is ended by force."""


def main() -> int:
    """Repeat, print figures; 1 where something was left behind or an agent ended with another code."""
    reason = why_not()
    if reason is not None:
        print(f"no soak: {reason}", file=sys.stderr)
        return 1
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    pick = random.Random(0)
    times: dict[str, list[float]] = {"plain processes": [], "torch": []}
    left, wrong = 0, 0
    with hosts(2) as lab:
        for number in range(1, count + 1):
            kind = "torch" if number % WITH_TORCH_EVERY == 0 else "plain processes"
            job = _start(lab, kind)
            rank = pick.randrange(len(lab.hosts))
            seconds, stayed = _kill(job, rank, "plain_reduce" if kind == "torch" else "stuck.py")
            times[kind].append(seconds)
            left += stayed
            wrong += [agent.code for agent in job.agents.values()] != [5, 5]
            print(f"{number:4}: {seconds:5.2f} s, {stayed} left behind ({kind})", file=sys.stderr)
            for host in lab.hosts:
                host.jobs.clear()
    for kind, seconds_of in times.items():
        if seconds_of:
            print(
                f"rank SIGKILL on 2 hosts, {kind}: {len(seconds_of)} times, until all was gone "
                f"{statistics.median(seconds_of):.2f} s (median), {max(seconds_of):.2f} s at most"
            )
    print(f"left behind: {left} processes; jobs that ended with another code than 5: {wrong}")
    return int(left > 0 or wrong > 0)


def _start(lab: Lab, kind: str) -> Job:
    if kind == "torch":
        job = lab.launch([PLAIN, "1000000", "1"])
        job.wait_for_output("step 3 ", 2, timeout_s=240)
    else:
        job = lab.launch(script(lab, "stuck.py", STUCK))
        job.wait_for_output("stuck", 6, timeout_s=240)
    return job


def _kill(job: Job, host: int, text: str) -> tuple[float, int]:
    """Seconds until nothing was left, and what was left behind."""
    victim = min(job.pids(host, text))  # the rank itself; its children came later
    job.event()
    os.kill(victim, signal.SIGKILL)
    job.codes(timeout_s=240)
    deadline = time.monotonic() + SETTLED_S
    while job.left_behind() and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = time.monotonic() - job.event_s
    stayed = job.left_behind()
    for pid in stayed:
        os.kill(pid, signal.SIGKILL)
    return seconds, len(stayed)


if __name__ == "__main__":
    sys.exit(main())
