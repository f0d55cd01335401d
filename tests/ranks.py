"""Real ranks for tests: `run_ranks` calls functions in processes joined by Gloo, `train_ranks` runs the command."""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what launchers set, one thread a process."""
    launchers = ("SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_", "MUSTER_", "PYTEST_XDIST")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers) and k not in _LAUNCHER_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120", **more}


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Commands of ours come first on the PATH, each a shell's script."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables for one of `world_size` ranks on this host."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


class _Crew:
    """Processes that join as ranks once and then call what they are told to, one call after the other."""

    def __init__(self, world_size: int) -> None:
        port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.ranks = []
        for rank in range(world_size):
            with (self.folder / f"{rank}.log").open("w") as output:
                self.ranks.append(subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks"], cwd=ROOT, stdout=subprocess.PIPE, stderr=output,
                    stdin=subprocess.PIPE, env=clean_environment(**rank_environment(rank, world_size, port)),
                ))  # fmt: skip
        atexit.register(self.end)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """What each rank returned. Ends them all where one fails or takes too long."""
        try:
            for process in self.ranks:
                pickle.dump((function.__module__, function.__qualname__, args), process.stdin)  # type: ignore[arg-type]
                process.stdin.flush()  # type: ignore[union-attr]
            deadline = time.monotonic() + timeout_s
            for rank, process in enumerate(self.ranks):
                assert process.stdout is not None
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"rank {rank} did not return within {timeout_s} s:\n{self._said(rank)}"
            return [self._answer(rank) for rank in range(len(self.ranks))]
        except BaseException:
            self.end()
            raise

    def _answer(self, rank: int) -> Any:
        try:
            return pickle.load(self.ranks[rank].stdout)  # type: ignore[arg-type]
        except EOFError:
            self.ranks[rank].wait(timeout=10)
            raise AssertionError(f"rank {rank} failed:\n{self._said(rank)}") from None

    def _said(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")

    def end(self) -> None:
        """Kill them all."""
        _crews.pop(len(self.ranks), None)
        for process in self.ranks:
            process.kill()
            process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


_crews: dict[int, _Crew] = {}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(*args)` in that many joined ranks; what each returned, by rank. They are started once and kept."""
    if world_size not in _crews:
        _crews[world_size] = _Crew(world_size)
    return _crews[world_size].call(function, args, timeout_s)


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout_s: float = 120,
    cwd: Path | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands side by side to their ends; standard output and error together. Kills all at the time-out."""
    started = [
        subprocess.Popen(
            command, env=dict(environment), cwd=cwd or ROOT, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]  # fmt: skip
    deadline = time.monotonic() + timeout_s
    try:
        return [
            subprocess.CompletedProcess(process.args, process.wait(), output)
            for process in started
            for output in [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]]
        ]
    finally:
        for process in started:
            process.kill()


def train(*argv: str, cwd: Path | None = None, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m train ARGV…` as one process."""
    command = [sys.executable, "-m", "train", *argv]
    return run_together([command], [clean_environment(**env)], timeout_s=timeout_s, cwd=cwd)[0]


def train_ranks(
    world_size: int, *argv: str, cwd: Path | None = None, timeout_s: float = 120, **env: str
) -> list[subprocess.CompletedProcess[str]]:
    """`python -m train ARGV…` as that many ranks with torchrun's variables."""
    port = free_port()
    command = [sys.executable, "-m", "train", *argv]
    environments = [clean_environment(**{**rank_environment(r, world_size, port), **env}) for r in range(world_size)]
    return run_together([command] * world_size, environments, timeout_s=timeout_s, cwd=cwd)


def weights_digest(run: Path) -> str:
    """Hash of the weights in a run's newest checkpoint."""
    name = (run / "checkpoints" / "latest").read_text().strip()
    state = torch.load(run / "checkpoints" / name / "state.pt", weights_only=True)
    digest = hashlib.sha256()
    for key, tensor in state["model"].items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _serve() -> None:
    """A rank of a crew: calls from standard input, answers to what was standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the called functions print goes to the log
    while True:
        try:
            module, name, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        pickle.dump(getattr(importlib.import_module(module), name)(*args), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
