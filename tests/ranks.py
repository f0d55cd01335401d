"""Real ranks for tests: `run_ranks` starts processes that join by Gloo, call one function and return its values."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables for one of `world_size` ranks on this host."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(*args)` in that many processes; what each returned, by rank. Fails with all their output."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        commands = [[sys.executable, "-m", "tests.ranks", str(call), f"{folder}/{rank}"] for rank in range(world_size)]
        environments = [clean_environment(**rank_environment(rank, world_size, port)) for rank in range(world_size)]
        finished = run_together(commands, environments, timeout_s=timeout_s)
        for rank, done in enumerate(finished):
            assert done.returncode == 0, f"rank {rank} ended with {done.returncode}:\n{done.stdout}"
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


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


def _main() -> None:
    module, name, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    Path(sys.argv[2]).write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _main()
