"""Whatever starts the ranks, the run is the same: torchrun, mpirun, flags in two shells."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.ranks import clean_environment, free_port, run_together, weights_digest

CONFIG = """
strategy: {name: ddp}
model: {layers: 2, heads: 2, width: 32, dropout: 0.1}
data: {block_size: 32, paths: [TEXT]}
batch: {global_size: 10, micro_size: 3}
train: {steps: 8, log_every: 1, tensorboard: false, sample_tokens: 0}
"""


@pytest.mark.slow
def test_torchrun_mpirun_and_flags_give_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("how much wood would a woodchuck chuck " * 200)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("TEXT", str(tmp_path / "text.txt")))
    torchrun, mpirun = str(Path(sys.executable).parent / "torchrun"), shutil.which("mpirun")
    assert mpirun or "CI" not in os.environ, "mpirun is missing: apt-get install openmpi-bin"
    run = ["-m", "train", "run", "--config", str(config), "--runs-dir", str(tmp_path), "--run-id"]
    python = [sys.executable, *run]
    hyphens = ["--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    underscores = ["--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    ways = {
        "torchrun": [[torchrun, "--standalone", "--nproc-per-node", "2", *run, "torchrun"]],
        "mpirun": [[mpirun or "", "--allow-run-as-root", "--oversubscribe", "-n", "2", *python, "mpirun"]],
        "flags": [[*python, "flags", *hyphens, "--rank", str(rank)] for rank in (0, 1)],
        "flags-of-the-tutorial": [
            [*python, "flags-of-the-tutorial", *underscores, "--rank", str(rank)] for rank in (0, 1)
        ],
    }
    if not mpirun:
        del ways["mpirun"]  # CI has it; on a machine without, the others still compare
    digests = {}
    for name, commands in ways.items():
        done = run_together(commands, [clean_environment()] * len(commands))
        assert [process.returncode for process in done] == [0] * len(commands), done[0].stdout
        digests[name] = weights_digest(tmp_path / name)
        assert name.startswith(json.loads((tmp_path / name / "environment.json").read_text())["started_by"])
    assert len(set(digests.values())) == 1, digests
