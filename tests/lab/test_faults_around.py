"""What lies around a job fails it, or tries to: ports, other jobs, disks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts import PYTHON, Host, Lab
from tests.lab.faults import PLAIN, Table, needs_hosts, own, script
from train.launch.topology import ports_from

pytestmark = [pytest.mark.slow, needs_hosts]

PORT = 29500
MASTER_PORTS, CONTROL_PORTS = ports_from(PORT)


def occupy(host: Host, port: int) -> subprocess.Popen[bytes]:
    """Somebody there listens on a port, and says nothing to those who call."""
    code = f"import socket, time; s = socket.create_server(('', {port})); print('up', flush=True); time.sleep(3600)"
    process = host.popen([PYTHON, "-I", "-S", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_ports_taken_before(two: Lab) -> None:
    """The first candidates of both are in use: by somebody mute, who is not mistaken for agent 0."""
    for port in (MASTER_PORTS[0], CONTROL_PORTS[0], CONTROL_PORTS[1]):
        occupy(two.hosts[0], port)
    job = two.launch(["sh", "-c", "echo at $MASTER_PORT"], port=PORT)
    assert job.codes() == [0, 0], job.report()
    assert f"control port {CONTROL_PORTS[0]} is taken on this host" in job.agents[0].output
    assert [agent.output.count(f"at {MASTER_PORTS[1]}\n") for agent in job.agents.values()] == [1, 1]


def test_port_taken_in_between(two: Lab, table: Table) -> None:
    """Agent 0 has seen that the port is free; rank 0 finds it taken: all start again with the next one."""
    thief = f"""
import os, socket, subprocess, sys, time
if os.environ["MASTER_PORT"] == "{PORT}" and os.environ["RANK"] == "0":
    taken = socket.create_server(("", {PORT}))
    open("event", "w").write(str(time.monotonic()))
    raise SystemExit(subprocess.call(sys.argv[1:]))
os.execv(sys.argv[1], sys.argv[1:])
"""
    job = two.launch([*script(two, "thief.py", thief), PYTHON, PLAIN, "3", "1"], port=PORT)
    codes = job.codes(timeout_s=240)
    assert codes == [0, 0], job.report()
    assert [event["master_port"] for event in job.events("start")] == list(MASTER_PORTS[:2])
    assert "somebody else was quicker at the port: starting again with the next one" in job.agents[0].output
    assert job.report().count("seed 1 ends with") == 2
    taken_s = float((two.hosts[0].folder / "event").read_text())
    started_again_s = job.events("start")[1]["time"] - (time.time() - time.monotonic())
    table.row("port taken in between: started again", started_again_s - taken_s, 20, job.agents[0].last_line)


def test_two_jobs_with_the_same_ports_at_the_same_time(two: Lab) -> None:
    first = two.launch([PLAIN, "8", "1"], port=PORT)
    second = two.launch([PLAIN, "8", "2"], port=PORT)
    assert [*first.codes(timeout_s=240), *second.codes(timeout_s=240)] == [0, 0, 0, 0], first.report() + second.report()
    assert first.left_behind() == second.left_behind() == {}
    ends = []
    for seed, job in ((1, first), (2, second)):
        said = [line for line in job.report().splitlines() if "ends with" in line]
        assert all(f"seed {seed} ends with" in line for line in said)
        ends.append({line.split("ends with ")[1].split(" on ")[0] for line in said})
        assert len(said) == 2
    assert [len(end) for end in ends] == [1, 1]  # both ranks of a job agree
    assert ends[0] != ends[1]
    assert first.events("start")[0]["master_port"] != second.events("start")[0]["master_port"]


def small_disk(host: Host, folder: Path, size: str) -> Path:
    """A tiny file system, mounted on a folder of that host; the path by which it is seen from outside."""
    folder.mkdir(exist_ok=True)
    host.run(f"mount -t tmpfs -o size={size} tmpfs {folder}")
    return Path(f"/proc/{host.init}/root{folder}")


def test_disk_full_of_logs(two: Lab, table: Table) -> None:
    """The job goes on; its console tells that the log is not whole. A rank that breaks is told all the same."""
    runs = two.folder / "runs"
    seen = small_disk(two.hosts[0], runs, "128k")
    talks = 'i=0; while [ $i -lt 3000 ]; do echo "line $i of a hundred bytes ......................................"; '
    talks += "i=$((i+1)); done; echo done; sleep 0.5; [ $RANK = 0 ] || sleep 3600"
    job = two.launch(["sh", "-c", talks], runs_dir=runs)
    job.wait_for_output("| done", 2)
    job.wait_for_output("No space left on device", 1)
    job.event()
    os.kill(job.pids(1, "sh -c")[0], signal.SIGKILL)
    assert job.codes() == [5, 5], job.report()
    table.row("disk of host 0 full, then rank SIGKILL", job.gone_s(), 5, job.agents[0].last_line)
    assert job.agents[0].last_line.startswith("muster: rank 1 (node1) was killed by signal 9 (SIGKILL)")
    assert job.agents[0].output.count("cannot write") == 1, job.report()
    assert "line 2999 of" in job.agents[0].output
    assert "cannot write" not in job.agents[1].output
    (log,) = (two.hosts[1].folder.parent / "runs").rglob("rank1.log")  # host 1's own disk has room
    assert "line 2999 of" in log.read_text()
    assert seen.exists()


def test_disk_full_when_the_last_checkpoint_is_due(two: Lab, table: Table) -> None:
    """One save that fails does not end the training; but a stop then saves nothing, and says so."""
    runs = two.folder / "runs"
    small_disk(two.hosts[0], runs, "1M")
    job = two.launch(own(two, "pass", "--train.save_every=200"), runs_dir=runs)
    job.wait_for_output("step 1/", timeout_s=150)
    two.hosts[0].run(f"cat /dev/zero > {runs}/filled || true")
    job.wait_for_output("older checkpoints stay, training goes on (1 of 3)")
    assert "cannot save step 200 in" in job.report()
    assert "the disk is full" in job.report()
    job.event()
    job.agents[1].send(signal.SIGTERM)
    assert job.codes() == [8, 8], job.report()
    table.row("disk of host 0 full, then SIGTERM", job.gone_s(), 10, job.agents[0].last_line)
    assert "could not be saved" in job.agents[0].last_line, job.report()
    assert "of 1000000, saved" not in job.report()
    assert job.agents[0].last_line == job.agents[1].last_line


def test_shared_memory_is_full(two: Lab, table: Table) -> None:
    """/dev/shm is full before the start, as others' leftovers make it: the job runs all the same."""
    two.hosts[1].run("mount -t tmpfs -o size=64k tmpfs /dev/shm; cat /dev/zero > /dev/shm/leftover || true")
    job = two.launch(["sh", "-c", "echo up; sleep 0.5"], nproc=2)
    assert job.codes() == [0, 0], job.report()
    assert job.report().count("| up") == 4


def test_command_is_missing_on_one_host(two: Lab, table: Table) -> None:
    tool = two.hosts[0].folder / "tool"
    tool.write_text("#!/bin/sh\nsleep 3600\n")
    tool.chmod(0o755)
    job = two.launch(["./tool"])
    job.event()
    assert job.codes() == [2, 2], job.report()
    table.row("command missing on one host", job.gone_s(), 5, job.agents[0].last_line)
    assert "node1 could not start its ranks: cannot start './tool': No such file" in job.agents[0].last_line
    assert job.agents[0].last_line == job.agents[1].last_line
