"""Jobs started carelessly: with another job's secret, where nothing can be written, with a command that vanishes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import Lab, until
from tests.lab.faults import IDLE, needs_hosts
from tests.ranks import ROOT, clean_environment

pytestmark = pytest.mark.slow

SAME = dict.fromkeys(range(2), "the one secret of a careless user")
SPEAKS = "echo rank $RANK of {0}; i=0; while [ $i -lt 40 ]; do i=$((i+1)); sleep 0.05; done"


def alone(*words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """An agent on this host alone, its standard input a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "train", "node", "--standalone", "--runs-dir", "runs", *words],
        cwd=cwd, env=clean_environment(PYTHONPATH=str(ROOT), **more), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@needs_hosts
def test_two_jobs_with_one_secret_and_the_same_ports_do_not_mix(two: Lab) -> None:
    first = two.launch(["sh", "-c", SPEAKS.format("first")], secrets_of=SAME)
    second = two.launch(["sh", "-c", SPEAKS.format("second")], secrets_of=SAME)
    assert [*first.codes(), *second.codes()] == [0, 0, 0, 0], first.report() + second.report()
    for job, name, other in ((first, "first", "second"), (second, "second", "first")):
        for index in range(2):
            assert f"rank {index} of {name}" in job.agents[index].output
            assert f"of {other}" not in job.agents[index].output


@needs_hosts
def test_a_host_on_which_nothing_can_be_written_is_named_and_nothing_is_started(two: Lab) -> None:
    job = two.launch(IDLE, options=["--runs-dir", "/proc/nowhere"], only=[1])
    job.agents |= two.launch(IDLE, only=[0], secrets_of={0: _secret_of(two, 1)}).agents
    assert job.codes() == [2, 2], job.report()
    for agent in job.agents.values():
        assert "node1 could not start its ranks: --runs-dir: cannot write /proc/nowhere/" in agent.last_line
    assert job.left_behind() == {}


def _secret_of(lab: Lab, host: int) -> str:
    return max(lab.hosts[host].folder.glob("secret-*"), key=lambda path: path.stat().st_mtime_ns).read_text()


def test_a_restart_that_cannot_start_takes_nothing_of_the_run_away(tmp_path: Path) -> None:
    """The command saves something, vanishes and fails: the second start is refused, and what was saved stays."""
    command = tmp_path / "dies.sh"
    command.write_text('#!/bin/sh\nmkdir -p "$MUSTER_RUNS_DIR/$MUSTER_RUN_ID/checkpoints/one"\nrm "$0"\nexit 1\n')
    command.chmod(0o755)
    agent = alone("--run-id", "precious", "--max-restarts", "1", "--", "./dies.sh", cwd=tmp_path)
    output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 2, output
    assert "starting again (1 of 1)" in output
    assert (tmp_path / "runs" / "precious" / "checkpoints" / "one").is_dir()


def test_an_old_verdict_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    verdict = tmp_path / "runs" / "again" / "verdict.json"
    first = alone("--run-id", "again", "--", "false", cwd=tmp_path)
    first.communicate(timeout=60)
    assert json.loads(verdict.read_text())["exit_code"] == first.returncode == 5
    second = alone("--run-id", "again", "--", "sh", "-c", "echo up; sleep 60", cwd=tmp_path)
    assert second.stdout is not None
    while second.stdout.readline() != "up\n":
        pass
    assert not verdict.exists()
    second.kill()
    second.communicate(timeout=60)


@pytest.mark.parametrize(
    "command", [["sh", "-c", "echo up; sleep 60"], ["run", "--model.name=linear", "--data.name=regression"]]
)
def test_a_second_job_of_the_same_name_says_nothing_of_the_firsts_folder(tmp_path: Path, command: list[str]) -> None:
    first = alone("--run-id", "mine", "--", "sh", "-c", "echo up; sleep 60", cwd=tmp_path)
    log = tmp_path / "runs/mine/logs" / f"node0-{socket.gethostname()}" / "rank0.log"
    until(lambda: log.exists() and "up\n" in log.read_text(), 30)  # written by another thread than the console
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    second = alone("--run-id", "mine", "--", *command, cwd=tmp_path)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2, output
    assert "run mine is in use by agent" in output.splitlines()[-1]
    assert "run folder" not in output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == kept
    first.terminate()
    first.communicate(timeout=60)


def test_it_stops_when_whoever_started_it_lets_go_of_its_standard_input(tmp_path: Path) -> None:
    """As over SSH: the line is cut, the job saves and ends."""
    script = 'trap "echo saved; exit 0" TERM; echo up; while :; do sleep 0.05; done'
    agent = alone("--die-with-stdin", "--", "sh", "-c", script, cwd=tmp_path)
    assert agent.stdin is not None
    assert agent.stdout is not None
    while agent.stdout.readline() != "up\n":
        pass
    agent.stdin.close()
    output = agent.stdout.read()
    assert agent.wait(30) == 75, output
    assert "stopped by the end of standard input" in output.splitlines()[-1]
    assert "saved" in output


def test_the_warning_before_the_limit_and_the_limit_itself_are_one_request(tmp_path: Path) -> None:
    """Slurm sends USR2 ahead of time and SIGTERM at the limit: who saves meanwhile is not cut short."""
    script = 'trap "sleep 3; echo saved; exit 0" TERM; echo up; while :; do sleep 0.05; done'
    agent = alone("--", "sh", "-c", script, cwd=tmp_path)
    assert agent.stdout is not None
    while agent.stdout.readline() != "up\n":
        pass
    agent.send_signal(signal.SIGUSR2)
    while "stopping, asked by SIGUSR2" not in agent.stdout.readline():
        pass
    time.sleep(1.0)  # longer than a Ctrl-C that comes twice
    agent.send_signal(signal.SIGTERM)
    output = agent.stdout.read()
    assert agent.wait(30) == 75, output
    assert "saved" in output


@needs_hosts
def test_an_agent_that_was_stopped_does_not_leave_its_ranks_running(two: Lab) -> None:
    """Its host is well: its keeper ends them, though the agent itself sleeps on."""
    job = two.launch(IDLE)
    job.wait_for_output("| up", 2)
    rank = job.pids(1, "sleep 3600")[0]
    job.agents[1].send(signal.SIGSTOP)
    until(lambda: not Path(f"/proc/{rank}").exists() or "Z" in Path(f"/proc/{rank}/stat").read_text(), 30)
    job.agents[1].send(signal.SIGCONT)
    job.agents[1].process.send_signal(signal.SIGCONT)  # nsenter, which stops when what it started does
    assert job.codes() == [7, 7], job.report()
    assert job.left_behind() == {}
