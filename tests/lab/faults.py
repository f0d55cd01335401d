"""What the tests of faults share: the time from the event, the table's rows, and ranks that misbehave."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import PYTHON, Job, Lab, why_not
from tests.odd import odd_job

PLAIN, DDP = (str(Path(__file__).parent / f"plain_{name}.py") for name in ("reduce", "ddp"))
NOW = "import time; open('event', 'w').write(str(time.monotonic()));"
"""For code in a rank: this is the moment."""

needs_hosts = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

IDLE = ["sh", "-c", "echo up $RANK; exec sleep 3600"]
"""Ranks that do nothing, and start at once."""

STUCK = """
import os, signal, time
print("rank", flush=True)
for how in ("child", "grandchild", "own session"):
    if os.fork() == 0:
        if how == "own session":
            os.setsid()
        if how == "grandchild" and os.fork():
            os._exit(0)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
        print("stuck", flush=True)
        while True:
            time.sleep(0.01)
time.sleep(3600)
"""
"""Ranks with children that heed no signal, one without its parent and one with a session of its own."""


def own(lab: Lab, act: str, *flags: str) -> list[str]:
    """`run …` of a job in which rank 1 does something odd in its thirtieth forward pass."""
    return odd_job(
        lab.folder, act, "--train.steps=1000000", "--train.tensorboard=false", "--train.log_every=10", *flags, call=30
    )


def script(lab: Lab, name: str, text: str) -> list[str]:
    """The command of a small Python script that needs no packages."""
    path = lab.folder / name
    path.write_text(text)
    return [PYTHON, "-I", "-S", str(path)]


def event_in(job: Job, host: int, timeout_s: float = 60) -> None:
    """Wait until a rank on that host has left word of the moment."""
    path = job.hosts[host].folder / "event"
    job.wait_until(lambda: path.exists() and path.read_text(), timeout_s)
    job.event_s = float(path.read_text())


class Table:
    """Notes rows for the table that is printed at the end of the tests."""

    def __init__(self, record_property: Callable[[str, object], None]) -> None:
        self._record = record_property

    def row(self, fault: str, seconds: float, target_s: float, said: str) -> None:
        """A fault, seconds from the event until all was gone, and the last line on a console."""
        self._record("fault", {"fault": fault, "seconds": round(seconds, 2), "target_s": target_s, "said": said})
        assert seconds <= target_s, f"{fault}: {seconds:.1f} s until all was gone, {target_s:g} s are promised"


def ended(
    job: Job, table: Table, fault: str, target_s: float, codes: list[int], *, verdict_on: int = 0, **expected: Any
) -> dict[str, Any]:
    """Wait for the job's end and see that it is as it should be.

    Args:
        job: the job, its event noted.
        table: takes the row.
        fault: what the table calls it.
        target_s: what is promised.
        codes: of all agents.
        verdict_on: the host that has the verdict that counts.
        expected: what verdict.json must hold.

    Returns:
        verdict.json.
    """
    found = job.codes(timeout_s=target_s + 30)
    seconds = job.gone_s(timeout_s=20)
    assert found == codes, job.report()
    verdict = job.verdict(verdict_on)
    last = job.agents[verdict_on].last_line
    table.row(fault, seconds, target_s, last)
    for key, value in expected.items():
        assert verdict[key] == value, (key, verdict, job.report())
    assert verdict["exit_code"] == codes[verdict_on], job.report()
    for agent in job.agents.values():
        assert "Traceback" not in agent.output.split("last lines:")[-1].split("muster: run folder")[-1], job.report()
    assert last.startswith(f"muster: {(verdict['cause'] or '').splitlines()[0]}"), job.report()
    return verdict


def soon(seconds: float = 0.3) -> None:
    """Let a job run a little."""
    time.sleep(seconds)
