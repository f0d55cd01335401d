"""A host or its agent breaks: the others are gone soon and say so, and what is cut off ends by itself."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hosts import Job, Lab
from tests.lab.faults import IDLE, STUCK, Table, ended, needs_hosts, script

pytestmark = [pytest.mark.slow, needs_hosts]

AGENT_GONE_S = HOST_LOST_S = 15.0
THAWED_S = 5.0
KILLED = -signal.SIGKILL
ENDED = "the connection of its agent ended (the agent or its host was killed or rebooted)"
SILENT = "no word from it for 8 s (its network or power was cut, or it is frozen)"


def running(lab: Lab, nproc: int = 2) -> Job:
    """A job of ranks that do nothing, on all hosts of the lab."""
    job = lab.launch(IDLE, nproc=nproc)
    job.wait_for_output("| up ", nproc * len(lab.hosts))
    return job


def test_agent_killed(three: Lab, table: Table) -> None:
    job = running(three)
    job.event()
    job.agents[1].send(signal.SIGKILL)
    verdict = ended(
        job, table, "agent SIGKILL (host 1 of 0-2)", AGENT_GONE_S, [7, KILLED, 7],
        outcome="failed", host="node1", node_rank=1, rank=None,
        cause=f"host node1 (node rank 1, ranks 2-3) was lost: {ENDED}",
    )  # fmt: skip
    assert "look at that host" in verdict["advice"]
    assert job.agents[0].last_line == job.agents[2].last_line


def test_agent_0_killed(three: Lab, table: Table) -> None:
    """Agent 0 is gone, and with it who would say so: the others know, and the lowest has the verdict."""
    job = running(three)
    job.event()
    job.agents[0].send(signal.SIGKILL)
    verdict = ended(
        job, table, "agent 0 SIGKILL", AGENT_GONE_S, [KILLED, 7, 7], verdict_on=1,
        outcome="failed", host="node0", node_rank=0,
    )  # fmt: skip
    assert verdict["cause"].startswith("host node0 (node rank 0) was lost: the connection to its agent ended")
    assert job.verdict(2)["cause"] == verdict["cause"]


def test_host_cut_off(three: Lab, table: Table) -> None:
    job = running(three)
    job.event()
    three.hosts[1].cut()
    ended(
        job, table, "host cut off silently (host 1 of 0-2)", HOST_LOST_S, [7, 7, 7],
        host="node1", node_rank=1, cause=f"host node1 (node rank 1, ranks 2-3) was lost: {SILENT}",
    )  # fmt: skip
    assert "host node0 (node rank 0) was lost: no word from it for 8 s" in job.agents[1].last_line
    assert job.verdict(1)["exit_code"] == 7


def test_host_0_cut_off(three: Lab, table: Table) -> None:
    job = running(three)
    job.event()
    three.hosts[0].cut()
    verdict = ended(job, table, "host 0 cut off silently", HOST_LOST_S, [7, 7, 7], verdict_on=1, host="node0")
    assert verdict["cause"].startswith("host node0 (node rank 0) was lost: no word from it for 8 s")
    assert job.verdict(0)["cause"] == (
        "host node0 (node rank 0, ranks 0-1) was lost: no word from any of the other 2 hosts for 8 s "
        "(its own network was cut)"
    )


def test_host_loses_power(three: Lab, table: Table) -> None:
    job = running(three)
    job.event()
    three.hosts[2].power_off()
    ended(
        job, table, "host loses power (host 2 of 0-2)", HOST_LOST_S, [7, 7, KILLED],
        host="node2", node_rank=2, cause=f"host node2 (node rank 2, ranks 4-5) was lost: {SILENT}",
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [0, 1])
def test_host_frozen(three: Lab, table: Table, frozen: int) -> None:
    job = running(three)
    job.event()
    others = [host for host in range(3) if host != frozen]
    three.hosts[frozen].freeze()
    for other in others:
        assert job.agents[other].process.wait(40) == 7, job.report()
    seconds = job.gone_s(hosts=others)
    lowest = job.agents[others[0]]
    table.row(f"host {frozen} frozen: the others", seconds, HOST_LOST_S, lowest.last_line)
    assert lowest.last_line.startswith(f"muster: host node{frozen} (node rank {frozen}"), job.report()
    assert job.left_behind([frozen])
    job.event()
    three.hosts[frozen].thaw()
    assert job.agents[frozen].process.wait(30) == 7, job.report()
    table.row(f"host {frozen} frozen: its own, after it thaws", job.gone_s(), THAWED_S, job.agents[frozen].last_line)
    assert "Traceback" not in job.report()


def test_host_never_comes(three: Lab, table: Table) -> None:
    job = three.launch(IDLE, options=["--join-timeout-s", "3", "--hosts", "alice,bob,carol"], only=[0, 2])
    job.event()
    assert job.codes() == [4, 4], job.report()
    table.row("host never comes, --join-timeout-s 3", job.gone_s(), 3 + 5, job.agents[0].last_line)
    assert "host bob (node rank 1) of 3 never came within 3 s; here: alice, carol" in job.agents[0].last_line
    assert "firewall" in job.agents[0].last_line or "reach this host's control port" in job.agents[0].last_line
    assert job.agents[2].last_line == job.agents[0].last_line
    assert "up" not in job.report().split()


def test_wrong_secret(two: Lab, table: Table) -> None:
    job = two.launch(IDLE, options=["--join-timeout-s", "3"], secrets_of={1: "another secret, as long as the first"})
    job.event()
    assert job.codes() == [4, 4], job.report()
    table.row("wrong secret, --join-timeout-s 3", job.gone_s(), 3 + 10, job.agents[1].last_line)
    assert "the agent there has another secret" in job.agents[1].last_line
    assert "host node1 (node rank 1) of 2 never came within 3 s" in job.agents[0].last_line
    assert "another secret, as long" not in job.report()
    assert f"with another secret called: {two.hosts[1].address}" in job.agents[0].last_line


@pytest.mark.parametrize("killed", [0, 1])
def test_agent_killed_with_stuck_children(two: Lab, table: Table, killed: int) -> None:
    """As data-loader workers that read from a dead file system: they heed no signal, and some lose their parent."""
    job = two.launch(script(two, "stuck.py", STUCK), nproc=2)
    job.wait_for_output("stuck", 12)
    job.event()
    job.agents[killed].send(signal.SIGKILL)
    codes = [KILLED if host == killed else 7 for host in (0, 1)]
    ended(
        job, table, f"agent {killed} SIGKILL, stuck children, grandchildren, own sessions", AGENT_GONE_S, codes,
        verdict_on=1 - killed, host=f"node{killed}",
    )  # fmt: skip


LOADER = """
import signal, time, torch
class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print("stuck", flush=True)
        while True:
            time.sleep(0.01)
for _ in torch.utils.data.DataLoader(Stuck(), num_workers=2):
    pass
"""


def test_agent_killed_with_stuck_data_loader_workers(two: Lab, table: Table) -> None:
    (two.folder / "loads.py").write_text(LOADER)
    job = two.launch([str(two.folder / "loads.py")])
    job.wait_for_output("stuck", 4, timeout_s=150)
    job.event()
    job.agents[1].send(signal.SIGKILL)
    ended(job, table, "agent SIGKILL, stuck data-loader workers", AGENT_GONE_S, [7, KILLED], host="node1")


def test_agent_killed_with_wrapper_and_own_session(two: Lab, table: Table) -> None:
    wrapped = ["sh", "-c", "setsid sleep 3600 & (sleep 3601 &) ; nohup sleep 3602; echo went on"]
    job = two.launch(wrapped, nproc=2)
    job.wait_until(lambda: all(len(job.pids(host, "sleep 360")) >= 8 for host in (0, 1)))
    job.event()
    job.agents[1].send(signal.SIGKILL)
    ended(job, table, "agent SIGKILL, shell wrapper, own sessions", AGENT_GONE_S, [7, KILLED], host="node1")
    assert "went on" not in job.agents[1].output


def test_keeper_killed(two: Lab, table: Table) -> None:
    """The job goes on with a new keeper, which does what the first one would have done."""
    job = two.launch(script(two, "stuck.py", STUCK))
    job.wait_for_output("stuck", 6)
    (keeper,) = job.pids(1, "keeper.py")
    os.kill(keeper, signal.SIGKILL)
    job.wait_until(lambda: job.pids(1, "keeper.py") not in ([], [keeper]))
    job.event()
    job.agents[1].send(signal.SIGKILL)
    ended(job, table, "keeper SIGKILL, then its agent", AGENT_GONE_S, [7, KILLED], host="node1")


def test_short_outages_change_nothing(three: Lab) -> None:
    """A cable that is out for four seconds, a host that stands still for four: the job goes on to its end."""
    job = three.launch(["sh", "-c", "echo up; sleep 14; echo done"])
    job.wait_for_output("| up", 3)
    three.hosts[1].cut()
    time.sleep(4)
    three.hosts[1].heal()
    three.hosts[2].freeze()
    time.sleep(4)
    three.hosts[2].thaw()
    assert job.codes() == [0, 0, 0], job.report()
    assert job.report().count("| done") == 3
    assert job.agents[1].last_line == job.agents[2].last_line == "muster: finished"


def test_all_agents_killed_at_once(two: Lab, table: Table) -> None:
    job = two.launch(script(two, "stuck.py", STUCK), nproc=2)
    job.wait_for_output("stuck", 12)
    job.event()
    for agent in job.agents.values():
        agent.send(signal.SIGKILL)
    assert job.codes() == [KILLED, KILLED]
    table.row("all agents SIGKILL, stuck children", job.gone_s(), AGENT_GONE_S, "(nobody is left to say anything)")
