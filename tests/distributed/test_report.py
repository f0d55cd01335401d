"""A real run under the agent, with a slow rank and a restart: seen while it goes, and in the page made at its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, train
from tests.unit.test_report_page import looked_at
from train.report.ledger import ledger_of, starts_of
from train.report.read import read_run
from train.report.straggle import heat_of

OWN = """
import os, signal, time, torch
from torch.utils.data import TensorDataset
def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1]), TensorDataset(x[:8], x[:8, :1])
class Slow(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        rank = os.environ["RANK"]
        time.sleep(0.08 if rank == "2" else 0.02)
        if rank == "1" and self.calls == 50 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
def model():
    return Slow(4, 1)
"""
FLAGS = ["--strategy.name=ddp", "--data.name=own_slow:data", "--model.name=own_slow:model", "--batch.global_size=9",
         "--train.steps=100", "--train.save_every=40", "--train.tensorboard=false"]  # fmt: skip


@pytest.mark.slow
def test_a_slow_rank_and_a_restart_are_seen_at_a_glance(tmp_path: Path) -> None:
    (tmp_path / "own_slow.py").write_text(OWN)
    env = clean_environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    agent = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    command = [*agent, "--run-id=slow", f"--runs-dir={tmp_path}", "--", "run", *FLAGS]
    run = tmp_path / "slow"
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        deadline = time.monotonic() + 120
        watched = ""
        while job.poll() is None and "rank 2 holds up the others" not in watched:
            assert time.monotonic() < deadline
            watched = train("watch", str(run), "--once").stdout if (run / "live.json").exists() else ""
            time.sleep(0.1)
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert "rank 2 holds up the others" in watched, "while it ran"

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [40]
    found = looked_at((run / "report.html").read_text(encoding="utf-8"))
    assert "took" in found.text and "Rank 2 (" in found.text
    killed_at = re.search(r"killed by signal 9 \(SIGKILL\) at step (\d+)", output)
    assert killed_at is not None
    assert f"{int(killed_at[1]) - 40} steps were lost by restarts and done again." in found.text  # saved at 40
    assert found.text.count("restart 1") >= 3

    starts = starts_of(read_run(run))
    ledger = ledger_of(starts)
    heat = heat_of(starts)
    assert heat.mean(2) > 2
    assert heat.mean(0) < 1.5 and heat.mean(1) < 1.5
    untold = max(account["untold"] for account in ledger.ranks.values()) / ledger.wall_s
    print(f"not told: {untold:.2%} of {ledger.wall_s:.1f} s; too much: {ledger.excess:.2%}")
    assert untold < 0.02
    assert ledger.excess < 0.02
    slow, quick = ledger.ranks[2], ledger.ranks[0]
    assert slow["computing"] > 2 * quick["computing"]
    assert quick["waiting"] > 2 * slow["waiting"]
    assert sum(quick.values()) == pytest.approx(ledger.wall_s)
