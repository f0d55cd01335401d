"""Asked to stop, at any agent and in any way: all ranks on all hosts end in good order, or at once if asked twice."""

from __future__ import annotations

import shlex
import signal
import time

import pytest

from tests.hosts import Lab
from tests.lab.faults import IDLE, Table, ended, needs_hosts, own, script

pytestmark = [pytest.mark.slow, needs_hosts]

SAVES = ["sh", "-c", 'trap "echo saved; exit 0" TERM; echo up; while :; do sleep 0.05; done']
STUBBORN = ["sh", "-c", 'trap "" TERM INT HUP; echo up; while :; do sleep 0.05; done']
STOP_S = 5.0


BEHIND_A_SHELL = """
import signal, sys, time
def save(*_):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_any_signal_at_any_agent_stops_all(two: Lab, table: Table, number: signal.Signals) -> None:
    job = two.launch(SAVES)
    job.wait_for_output("| up", 2)
    at = number % 2
    job.event()
    job.agents[at].send(number)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    verdict = ended(job, table, f"{name} once, at agent {at}, script saves", STOP_S, [75, 75], outcome="stopped")
    assert verdict["cause"] == f"stopped by {name} at node{at}, saved: the same command goes on from there"
    assert "rank 0 | saved" in job.agents[0].output
    assert "rank 1 | saved" in job.agents[1].output


def test_ctrl_c_of_a_script_that_saves_nothing(two: Lab, table: Table) -> None:
    job = two.launch(IDLE)
    job.wait_for_output("| up", 2)
    job.event()
    job.agents[0].send(signal.SIGINT)
    verdict = ended(job, table, "Ctrl-C once, script ends at once", STOP_S, [8, 8], outcome="stopped")
    assert "with nothing saved" in verdict["cause"]


def test_program_behind_a_shell_has_time_to_save(two: Lab, table: Table) -> None:
    program = shlex.join(script(two, "saves.py", BEHIND_A_SHELL))
    job = two.launch(["sh", "-c", f"{program}; echo ended with $?"])
    job.wait_for_output("| up", 2)
    job.event()
    job.agents[1].send(signal.SIGTERM)
    verdict = ended(job, table, "SIGTERM, a shell's program saves for 3 s", 3 + STOP_S, [75, 75], outcome="stopped")
    assert verdict["cause"] == "stopped by SIGTERM at node1, saved: the same command goes on from there"
    assert "rank 0 | saved\nnode0 rank 0 | ended with 0\n" in job.agents[0].output


def test_ctrl_c_twice(two: Lab, table: Table) -> None:
    job = two.launch(STUBBORN, nproc=2)
    job.wait_for_output("| up", 4)
    job.agents[1].send(signal.SIGINT)
    time.sleep(1)
    assert len(job.pids(0, "trap")) == len(job.pids(1, "trap")) == 2
    job.event()
    job.agents[1].send(signal.SIGINT)
    verdict = ended(job, table, "Ctrl-C twice, ranks heed nothing", STOP_S, [8, 8], outcome="stopped")
    assert verdict["cause"] == "stopped at once by Ctrl-C at node1"


def test_grace_is_over(two: Lab, table: Table) -> None:
    job = two.launch(STUBBORN, options=["--grace-s", "2"])
    job.wait_for_output("| up", 2)
    job.event()
    job.agents[0].send(signal.SIGTERM)
    verdict = ended(job, table, "SIGTERM, ranks heed nothing, --grace-s 2", 2 + STOP_S, [8, 8], outcome="stopped")
    assert "not done within the grace of 2 s" in verdict["cause"]


def test_signal_while_hosts_are_waited_for(two: Lab, table: Table) -> None:
    job = two.launch(IDLE, only=[1])
    job.wait_for_output("calling agent 0")
    job.event()
    job.agents[1].send(signal.SIGTERM)
    assert job.codes() == [8], job.report()
    table.row("SIGTERM before the others came", job.gone_s(), STOP_S, job.agents[1].last_line)
    assert job.agents[1].last_line == "muster: stopped by SIGTERM before it began"


def test_stop_file_of_any_host(two: Lab, table: Table) -> None:
    job = two.launch(SAVES)
    job.wait_for_output("| up", 2)
    job.event()
    (job.run_folder(1) / "STOP").touch()
    ended(job, table, "STOP file on host 1", STOP_S, [75, 75], outcome="stopped")
    assert not (job.run_folder(1) / "STOP").exists()


def test_stop_is_followed_by_a_kill(two: Lab, table: Table) -> None:
    """An agent that is killed while its ranks save: the host is lost, and not everything was saved."""
    job = two.launch(STUBBORN)
    job.wait_for_output("| up", 2)
    job.agents[0].send(signal.SIGTERM)
    job.wait_for_output("stopping, asked by SIGTERM", 2)
    job.event()
    job.agents[1].send(signal.SIGKILL)
    ended(job, table, "agent SIGKILL while ranks save", 15, [7, -9], host="node1")


def test_our_own_ranks_stop_at_one_step_and_save(two: Lab, table: Table) -> None:
    job = two.launch(own(two, "pass"))
    job.wait_for_output("step 1/", timeout_s=150)
    job.event()
    job.agents[1].send(signal.SIGINT)
    verdict = ended(job, table, "Ctrl-C once, at agent 1, our own ranks", 2 * STOP_S, [75, 75], outcome="stopped")
    step = verdict["step"]
    assert step > 1
    assert verdict["cause"] == f"stopped by Ctrl-C at node1 at step {step}, saved: the same command goes on from there"
    assert (job.run_folder() / "checkpoints" / "latest").read_text().strip() == f"step-{step:08}"
