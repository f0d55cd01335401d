"""Many agents of one job on this machine: real processes, whose ranks are `sleep`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.ranks import ROOT, clean_environment, free_port
from train.launch import keeper
from train.launch.topology import is_loopback
from train.seam import SECRET_FILE, STATUS_PAGE

_TICKS = os.sysconf("SC_CLK_TCK")


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback: agents on several hosts refuse that one."""
    for name, stats in psutil.net_if_stats().items():
        for entry in psutil.net_if_addrs().get(name, ()):
            if stats.isup and entry.family.name == "AF_INET" and not is_loopback(entry.address):
                return entry.address
    raise RuntimeError("this machine has no address but loopback")


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, user and system (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int) -> float:
    """Memory that it holds now."""
    return psutil.Process(pid).memory_info().rss / 1e6


class Swarm:
    """`count` agents with `nproc` ranks each. Ends all of it on the way out."""

    def __init__(
        self,
        folder: Path,
        count: int,
        nproc: int = 1,
        command: Sequence[str] = ("/bin/sleep", "3600"),
        options: Sequence[str] = (),
        start: Sequence[int] | None = None,
        control_port: int | None = None,
    ) -> None:
        """
        Args:
            folder: for run folder, output and secret.
            count: agents.
            nproc: ranks of each.
            command: what a rank runs.
            options: more for each agent's command line.
            start: which agents to start on the way in, agent 0 first; None: all.
            control_port: where agent 0 listens; None: somewhere.
        """
        self.folder, self.count, self.nproc = folder, count, nproc
        self.run = folder / "runs" / "swarm"
        self.address, self.control_port = own_address(), control_port or free_port()
        self._to_start = list(range(count) if start is None else start)
        self._command, self._options, self._master_port = command, options, free_port()
        secret = folder / "secret"
        secret.write_text("a secret for many agents")
        secret.chmod(0o600)
        # Compiled modules are kept, as they are where Muster is installed: else each agent would compile them.
        self._environment = clean_environment(**{SECRET_FILE: str(secret), "PYTHONPYCACHEPREFIX": f"{folder}/compiled"})
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Swarm:
        try:
            for index in self._to_start:
                self.start(index)
                if index == 0:
                    wait_until(lambda: "waiting for" in self.said(0), 60)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
        for agent in self.agents:
            agent.wait()
        wait_until(lambda: not self.left(), 30)

    def start(self, index: int, control_port: int | None = None) -> None:
        """Start one agent, told another control port than agent 0's if one is given."""
        command = [
            sys.executable, "-m", "train", "node", "--nnodes", str(self.count), "--node-rank", str(index),
            "--nproc-per-node", str(self.nproc), "--master-addr", self.address, "--master-port",
            str(self._master_port), "--control-port", str(control_port or self.control_port), "--join-timeout-s", "300",
            "--hosts", ",".join(f"host{i}" for i in range(self.count)), "--run-id", "swarm",
            "--runs-dir", str(self.run.parent), *self._options, "--", *self._command,
        ]  # fmt: skip
        with (self.folder / f"agent{index}.out").open("wb") as output:
            self.agents.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )

    def said(self, index: int) -> str:
        """What an agent has printed."""
        return (self.folder / f"agent{index}.out").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Rows of `events.jsonl`."""
        path = self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ranks(self) -> set[int]:
        """Process ids of the ranks: children of agents, keepers left out."""
        agents = {agent.pid for agent in self.agents}
        pages = STATUS_PAGE.encode()
        return {
            pid
            for pid, process in keeper.processes().items()
            if process.parent in agents and any(e.startswith(pages) for e in keeper.environment_of(pid))
        }

    def left(self) -> set[int]:
        """Whatever runs of this job: agents, ranks, keepers."""
        marks = (f"MUSTER_RUNS_DIR={self.run.parent}".encode(), f"{SECRET_FILE}={self.folder}/secret".encode())
        here = keeper.processes()
        return {pid for pid in here if pid != os.getpid() and not set(marks).isdisjoint(keeper.environment_of(pid))}

    def wait_for_ranks(self, timeout_s: float = 300) -> None:
        """Until all ranks of all agents run."""
        wait_until(self._has_started, timeout_s)
        wait_until(lambda: len(self.ranks()) == self.count * self.nproc, timeout_s)

    def _has_started(self) -> bool:
        for index, agent in enumerate(self.agents):
            assert agent.poll() is None, f"agent {index} has ended: {self.said(index)}"
        return any(row["event"] == "start" for row in self.events())

    def wait_for_end(self, timeout_s: float) -> float:
        """Seconds from now until nothing of the job is left."""
        began_s = time.monotonic()
        wait_until(lambda: all(agent.poll() is not None for agent in self.agents), timeout_s)
        wait_until(lambda: not self.left(), timeout_s)
        return time.monotonic() - began_s


def wait_until(what: Callable[[], bool], timeout_s: float) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"it never came to that within {timeout_s} s"
        time.sleep(0.05)
