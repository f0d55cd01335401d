"""A rank breaks: all ranks on all hosts are gone soon, and every agent says which rank it was and why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.hosts import Lab
from tests.lab.faults import NOW, PLAIN, Table, ended, event_in, needs_hosts, own, script
from tests.odd import ODD_LINE

pytestmark = [pytest.mark.slow, needs_hosts]

RANK_DIES_S = 5.0
STEP_S = 5
HANG_S = STEP_S + 10.0


def test_rank_killed(two: Lab, table: Table) -> None:
    job = two.launch([PLAIN, "1000000", "1"])
    job.wait_for_output("step 5", 2)
    (pid,) = job.pids(1, "plain_reduce")
    job.event()
    os.kill(pid, signal.SIGKILL)
    verdict = ended(
        job, table, "rank SIGKILL", RANK_DIES_S, [5, 5],
        outcome="failed", host="node1", node_rank=1, rank=1,
        cause="rank 1 (node1) was killed by signal 9 (SIGKILL)",
    )  # fmt: skip
    assert "want of memory" in verdict["advice"]
    assert any(line.startswith("step ") for line in verdict["evidence"])  # its own log, not the victim's
    assert job.agents[0].last_line == job.agents[1].last_line


def test_rank_raises(two: Lab, table: Table) -> None:
    job = two.launch([PLAIN, "1000000", "1", "1", NOW + "raise ValueError('no such label: -1')"])
    event_in(job, 1)
    verdict = ended(
        job, table, "rank raises", RANK_DIES_S, [5, 5],
        host="node1", node_rank=1, rank=1,
        cause="rank 1 (node1) failed: ValueError: no such label: -1 (plain_reduce.py:20)",
    )  # fmt: skip
    assert "[rank1]: Traceback (most recent call last):" in verdict["evidence"]


def test_rank_out_of_memory(two: Lab, table: Table) -> None:
    two.hosts[1].limit_memory(100)
    eats = script(
        two,
        "eats.py",
        f"""
import os, time
print("up", flush=True)
if os.environ["RANK"] == "2":
    {NOW}
    hoard = []
    while True:
        hoard.append(b"x" * 1_000_000)
time.sleep(3600)
""",
    )
    job = two.launch(eats, nproc=2, limited=[1])
    event_in(job, 1)
    verdict = ended(
        job, table, "rank out of memory (control group)", RANK_DIES_S, [5, 5],
        host="node1", node_rank=1, rank=2,
        cause="rank 2 (node1) was killed by signal 9 (SIGKILL): out of memory, the kernel says",
    )  # fmt: skip
    assert "micro_size" in verdict["advice"]


def test_worker_out_of_memory(two: Lab, table: Table) -> None:
    """The kernel kills the largest process: a rank's child, which the rank finds gone."""
    two.hosts[1].limit_memory(100)
    eats = script(
        two,
        "eats.py",
        f"""
import concurrent.futures, os, time
def eat():
    {NOW}
    return [b"x" * 1_000_000 for _ in range(1000)]
print("up", flush=True)
if os.environ["RANK"] == "1":
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(eat).result()
time.sleep(3600)
""",
    )
    job = two.launch(eats, limited=[1])
    event_in(job, 1)
    verdict = ended(job, table, "worker out of memory (control group)", RANK_DIES_S, [5, 5], host="node1", rank=1)
    assert "BrokenProcessPool" in verdict["cause"]
    assert verdict["cause"].endswith("(eats.py:9): out of memory, the kernel says")


def test_rank_stopped(two: Lab, table: Table) -> None:
    job = two.launch(own(two, "os.kill(os.getpid(), signal.SIGSTOP)", f"--runtime.step_timeout_s={STEP_S}"))
    event_in(job, 1)
    verdict = ended(job, table, "rank SIGSTOP", HANG_S, [6, 6], host="node1", node_rank=1, rank=1)
    assert "rank 1 (node1) is stopped (SIGSTOP, Ctrl-Z or a debugger)" in verdict["cause"]
    assert "debugger" in verdict["advice"]
    assert "timeout" not in verdict["advice"]


@pytest.mark.parametrize("act", ["while True: time.sleep(0.1)", "while True: pass"])
def test_rank_stuck(two: Lab, table: Table, act: str) -> None:
    job = two.launch(own(two, act, f"--runtime.step_timeout_s={STEP_S}"))
    event_in(job, 1)
    verdict = ended(job, table, f"rank stuck in Python ({act})", HANG_S, [6, 6], host="node1", node_rank=1, rank=1)
    assert "rank 1 (node1) has not entered all-reduce #" in verdict["cause"]
    assert f"it is in own_odd.py:{ODD_LINE} (forward); rank 0 waits for" in verdict["cause"]
    assert any(f"own_odd.py:{ODD_LINE}" in line for line in verdict["evidence"])
    assert list((job.run_folder() / "evidence").glob("*rank0.json"))
    assert list((job.run_folder(1) / "evidence").glob("*rank1.json"))


def test_rank_skips_a_collective(two: Lab, table: Table) -> None:
    """Ours: rank 1 alone enters a barrier, and so does not come to where rank 0 waits."""
    job = two.launch(own(two, "dist.barrier()", f"--runtime.step_timeout_s={STEP_S}"))
    event_in(job, 1)
    verdict = ended(job, table, "rank skips a collective", HANG_S, [6, 6], host="node1", node_rank=1, rank=1)
    assert "rank 1 (node1) has not entered all-reduce #" in verdict["cause"]
    assert f"it is in own_odd.py:{ODD_LINE} (forward); rank 0 waits for" in verdict["cause"]


def test_rank_of_a_foreign_script_skips_a_collective(two: Lab, table: Table) -> None:
    """The others see no difference until the last one is waited for in vain; all that is known is where each is."""
    once = "reduce = dist.all_reduce; dist.all_reduce = lambda _: setattr(dist, 'all_reduce', reduce)"
    job = two.launch([PLAIN, "7", "1", "1", NOW + once], options=["--idle-timeout-s", "15"])
    event_in(job, 1)
    verdict = ended(job, table, "rank of any script skips a collective, --idle-timeout-s 15", 25, [6, 6], rank=None)
    lines = Path(PLAIN).read_text().splitlines()
    reduce, barrier = (
        1 + next(i for i, line in enumerate(lines) if call in line) for call in ("dist.all_reduce(", "barrier(")
    )
    places = f"rank 0 is in plain_reduce.py:{reduce} (<module>), rank 1 is in plain_reduce.py:{barrier} (<module>)"
    assert places in verdict["cause"]
    assert "another way" in verdict["cause"]


def test_shapes_differ(two: Lab, table: Table) -> None:
    """Gloo aborts the rank with the smaller tensor. What it said comes before the stack of a program of many calls."""
    deep = "f = lambda n: f(n - 1) if n else dist.all_reduce(torch.zeros(2)); f(60)"
    job = two.launch([PLAIN, "1000000", "1", "1", NOW + deep])
    event_in(job, 1)
    verdict = ended(job, table, "mismatched shapes", RANK_DIES_S, [5, 5])
    assert "it met another rank in one collective with different amounts of data" in verdict["cause"]
    assert "same collectives on the same shapes" in verdict["advice"]
    assert any("op.preamble.length" in line for line in verdict["evidence"]), verdict["evidence"]


def test_program_behind_a_shell_killed(two: Lab, table: Table) -> None:
    """The shell lives on a moment, and tells of the signal in its own way."""
    job = two.launch(["bash", "-c", "sleep 3602; exit $?"])
    job.wait_until(lambda: job.pids(0, "sleep 3602") and job.pids(1, "sleep 3602"))
    job.event()
    os.kill(
        next(pid for pid in job.pids(1, "sleep 3602") if "bash" not in job.hosts[1].processes()[pid]), signal.SIGKILL
    )
    ended(
        job, table, "program behind a shell SIGKILL", RANK_DIES_S, [5, 5],
        host="node1", rank=1, cause="rank 1 (node1) was killed by signal 9 (SIGKILL)",
    )  # fmt: skip


def test_wrapper_and_own_session(two: Lab, table: Table) -> None:
    wrapped = ["sh", "-c", "setsid sleep 3600 & env -i setsid sleep 3601 & sleep 3602; echo went on"]
    job = two.launch(wrapped, nproc=2)
    job.wait_until(lambda: all(len(job.pids(host, "sleep 360")) >= 6 for host in (0, 1)))
    first = job.pids(1, "sh -c setsid")[0]
    job.event()
    os.kill(first, signal.SIGKILL)
    ended(
        job, table, "shell wrapper killed, children with own sessions", RANK_DIES_S, [5, 5],
        host="node1", rank=2, cause="rank 2 (node1) was killed by signal 9 (SIGKILL)",
    )  # fmt: skip
