"""`python -m tests.bench agents [COUNT]`: many agents of one job on this machine; what agent 0 costs, and a loss."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.swarm import Swarm, cpu_s, rss_mb

WINDOW_S = 20.0


def measure(folder: Path, count: int, nproc: int = 1, window_s: float = WINDOW_S) -> dict[str, Any]:
    """Start them, let them beat, kill one: seconds, shares of a core, megabytes."""
    began_s = time.monotonic()
    with Swarm(folder, count, nproc) as swarm:
        swarm.wait_for_ranks()
        start_s = time.monotonic() - began_s
        time.sleep(2)
        pids = [agent.pid for agent in swarm.agents]
        before, clock_s = [cpu_s(pid) for pid in pids], time.monotonic()
        time.sleep(window_s)
        spent_s = [cpu_s(pid) - old for pid, old in zip(pids, before, strict=True)]
        elapsed_s = time.monotonic() - clock_s
        memory = [rss_mb(pid) for pid in pids]
        victim = count // 2
        killed_at = time.time()
        swarm.agents[victim].kill()
        end_s = swarm.wait_for_end(120)
        at = {row["event"]: row["time"] - killed_at for row in swarm.events()}
        lost = next((row for row in swarm.events() if row["event"] == "host lost"), None)
        codes = {agent.returncode for index, agent in enumerate(swarm.agents) if index != victim}
        return {
            "agents": count,
            "ranks an agent": nproc,
            "start_s": start_s,
            "agent 0, share of a core": spent_s[0] / elapsed_s,
            "agent 0, s per agent and second": spent_s[0] / elapsed_s / count,
            "another agent, share of a core": statistics.mean(spent_s[1:]) / elapsed_s,
            "agent 0, MB": memory[0],
            "another agent, MB": statistics.median(memory[1:]),
            "noticed_s": at.get("host lost"),
            "verdict_s": at.get("verdict"),
            "all gone_s": end_s,
            "lost": None if lost is None else lost["host"],
            "victim": f"host{victim}",
            "exit codes": sorted(codes),
            "last lines": sorted({swarm.said(i).splitlines()[-1] for i in range(count) if i != victim})[:3],
        }


def main(argv: list[str]) -> dict[str, Any]:
    """Measure and print."""
    count = int(argv[0]) if argv else 200
    nproc = int(argv[1]) if argv[1:] else 1
    print(f"{count} agents with {nproc} ranks each …", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), count, nproc)
    for name, value in row.items():
        print(f"{name:<34}{f'{value:.5f}' if isinstance(value, float) else value}")
    return row
