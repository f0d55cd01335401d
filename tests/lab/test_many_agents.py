"""Many agents of one job, each a process of its own: `python -m tests.bench agents 200` is the same, larger."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.bench.agents import measure
from tests.swarm import Swarm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_sixty_agents_and_one_that_is_killed(tmp_path: Path) -> None:
    row = measure(tmp_path, 60, nproc=1, window_s=8.0)
    print(row)
    assert row["noticed_s"] < 2
    assert row["verdict_s"] < 15
    assert row["all gone_s"] < 15
    assert row["exit codes"] == [7]
    (line,) = row["last lines"]
    assert "host host30 (node rank 30, rank 30) was lost" in line
    assert row["another agent, share of a core"] < 0.01
    assert row["another agent, MB"] < 40
    assert row["agent 0, share of a core"] < 0.10
    assert row["agent 0, MB"] < 60


def test_an_agent_that_is_frozen_is_given_up_by_the_others_and_ends_its_ranks_when_it_thaws(tmp_path: Path) -> None:
    with Swarm(tmp_path, 12, nproc=2) as swarm:
        swarm.wait_for_ranks(120)
        swarm.agents[5].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        others = [agent for index, agent in enumerate(swarm.agents) if index != 5]
        wait_until(lambda: all(agent.poll() is not None for agent in others), 40)
        assert time.monotonic() - began_s < 15
        assert {agent.returncode for agent in others} == {7}
        assert "host host5 (node rank 5, ranks 10-11) was lost: no word from it for 8 s" in swarm.said(0)
        assert len(swarm.ranks()) == 2
        swarm.agents[5].send_signal(signal.SIGCONT)
        assert swarm.wait_for_end(20) < 5
        assert swarm.agents[5].returncode == 7


def test_an_agent_with_four_ranks_costs_next_to_nothing(tmp_path: Path) -> None:
    row = measure(tmp_path, 3, nproc=4, window_s=10.0)
    print(row)
    assert row["another agent, share of a core"] < 0.01
    assert row["another agent, MB"] < 40
