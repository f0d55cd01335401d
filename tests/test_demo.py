"""`make demo` from its end: two processes learn real text better than any count of trigrams."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, run_together


@pytest.mark.slow
def test_the_demo_learns_text_and_shows_it(tmp_path: Path) -> None:
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    words = recipe[1].split()
    command = [str(Path(sys.executable).parent / words[0]), *words[1:], "--runs-dir", str(tmp_path), "--run-id", "demo"]
    (done,) = run_together([command], [clean_environment()], timeout_s=290)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "demo"
    summary = json.loads((run / "summary.json").read_text())
    print(f"validation loss {summary['eval_loss']:.3f}, trigrams {summary['trigram_loss']:.3f}, {summary}")
    assert summary["eval_loss"] <= 1.5
    assert 1.5 < summary["trigram_loss"] < 2.0
    assert f"{summary['trigram_loss']:.4f} nats/byte" in done.stdout
    written = (run / "sample.txt").read_text()
    console = "\n".join(line.removeprefix("rank 0 | ") for line in done.stdout.splitlines())
    assert written.replace("\r", "\n") in console
    assert len(written) > 200
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["world_size"], environment["backend"]) == (2, "gloo")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(10, 1501, 10))
    assert set(steps[0]) == {"step", "time_s", "loss", "lr", "grad_norm", "items_per_s"}
    assert json.loads((run / "verdict.json").read_text())["exit_code"] == 0
    logs = sorted(path.name for path in run.glob("logs/node0-*/*.log"))
    assert logs == ["rank0.log", "rank1.log"]
    assert list((run / "tensorboard").glob("events.*"))
