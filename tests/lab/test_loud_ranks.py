"""Ranks that write as fast as they can: their agent still beats, hears and stops."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.swarm import Swarm, rss_mb, wait_until

pytestmark = pytest.mark.slow


def test_ranks_that_never_stop_writing_hold_up_nobody(tmp_path: Path) -> None:
    with Swarm(tmp_path, 2, nproc=2, command=("/usr/bin/yes",)) as swarm:
        swarm.wait_for_ranks(60)
        time.sleep(12)  # longer than the silence after which a host is lost
        assert [agent.poll() for agent in swarm.agents] == [None, None]
        assert max(rss_mb(agent.pid) for agent in swarm.agents) < 80
        began_s = time.monotonic()
        swarm.agents[1].send_signal(signal.SIGTERM)
        wait_until(lambda: all(agent.poll() is not None for agent in swarm.agents), 60)
        assert time.monotonic() - began_s < 8
        assert [agent.returncode for agent in swarm.agents] == [8, 8]
        assert [row["event"] for row in swarm.events() if row["event"] in ("host lost", "failure", "hang")] == []
        log = next(swarm.run.glob("logs/node0-*/rank0.log"))
        assert log.stat().st_size > 1_000_000
        assert log.read_bytes()[-3:] == b" y\n"
