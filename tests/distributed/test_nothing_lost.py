"""Killed at any moment and started again: the same bits; with other numbers of ranks: the same samples and losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, clean_environment
from train.checks import drill, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = (
    "--model.name", "mlp", "--data.name", "digits", "--data.val_fraction", "0.2", "--batch.global_size", "24",
    "--train.tensorboard", "false", "--train.log_every", "1",
)  # fmt: skip


def agent(runs: Path, run_id: str, nproc: int, *flags: str, limit_s: float | None = None) -> subprocess.Popen[str]:
    limit = [] if limit_s is None else ["--time-limit-s", str(limit_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", str(nproc), "--run-id", run_id,
         "--runs-dir", str(runs), *limit, "--", "run", *SMALL, *flags],
        cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_a_small_drill_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeded: a SIGTERM, then a kill of everything with a damaged checkpoint, then …; `make soak` deals twenty."""
    flags = (
        "--config",
        "ddp",
        *SMALL[:-2],
        "--train.epochs",
        "8",
        "--train.save_every",
        "25",
        "--train.eval_every",
        "10",
    )
    code = drill.main(["--kills", "3", "--seed", "3", "--runs-dir", str(tmp_path), *flags])
    said = capsys.readouterr()
    assert code == 0, said
    assert "drill: PROVEN with seed 3 on 2 ranks: 3 faults in" in said.out
    (folder,) = tmp_path.glob("drill-*")
    certificate = json.loads((folder / "drill.json").read_text())
    assert len(certificate["faults"]) == 3
    assert certificate["epochs"] == 8
    assert certificate["samples"] == 8 * 1438  # 1797 digits, less a fifth


def test_other_numbers_of_ranks_see_the_same_samples_and_lose_the_same(tmp_path: Path) -> None:
    flags = ("--strategy.name", "ddp", "--precision.name", "fp64", "--train.steps", "150", "--train.save_every", "10",
             "--train.log_samples", "true", "--train.sample_tokens", "0")  # fmt: skip
    finished(agent(tmp_path, "fixed", 4, *flags))
    for nproc, until in ((4, 40), (2, 90)):
        started = agent(tmp_path, "changing", nproc, *flags)
        mark = tmp_path / "changing" / "checkpoints" / f"step-{until:08}"
        wait_until(mark.exists, started)
        started.send_signal(signal.SIGTERM)
        said, _ = started.communicate(timeout=60)
        assert started.returncode == 75, said
    said = finished(agent(tmp_path, "changing", 3, *flags))
    assert "world_size was 2 and is 3" in said

    def by_step(run: Path) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank in range(4):
            for row in rows(run, f"samples/rank{rank}.jsonl"):
                found.setdefault(row["step"], []).extend(row["ids"])
        return found

    fixed, changing = by_step(tmp_path / "fixed"), by_step(tmp_path / "changing")
    assert sorted(fixed) == list(range(1, 151))
    assert changing == fixed  # in rank order: the global batch's own
    losses = [[row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("fixed", "changing")]
    assert len(losses[0]) == 150
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_a_time_limit_with_no_signal_is_kept_and_nothing_done_is_lost(tmp_path: Path) -> None:
    began_s = time.monotonic()
    process = agent(tmp_path, "limited", 2, "--config", "ddp", "--train.steps", "10000000", limit_s=30)
    said, _ = process.communicate(timeout=90)
    took_s = time.monotonic() - began_s
    assert process.returncode == 75, said
    assert 20 < took_s < 30, said
    verdict = json.loads((tmp_path / "limited" / "verdict.json").read_text())
    newest = (tmp_path / "limited" / "checkpoints" / "latest").read_text().strip()
    assert int(newest.removeprefix("step-")) == verdict["step"] == rows(tmp_path / "limited")[-1]["step"] > 0


SLOW_TO_EVALUATE = """
import time, torch
from torch.utils.data import TensorDataset
def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1]), TensorDataset(x[:8], x[:8, :1])
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.05 if self.training else 8.0)
        return super().forward(x)
def model():
    return Slow(4, 1)
"""


def test_an_evaluation_that_would_not_end_in_time_is_not_begun_be_the_last_one_ever_so_many_steps_ago(
    tmp_path: Path,
) -> None:
    """Nearly all the time goes into evaluations: the limit would come in one of them."""
    (tmp_path / "own_slow.py").write_text(SLOW_TO_EVALUATE)
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", "1", "--run-id", "slow",
         "--runs-dir", str(tmp_path), "--time-limit-s", "45", "--", "run", "--strategy.name=baseline",
         "--data.name=own_slow:data", "--model.name=own_slow:model", "--batch.global_size=8",
         "--train.steps=100000", "--train.eval_every=30", "--train.save_every=0", "--train.log_every=1"],
        cwd=ROOT, env=clean_environment(PYTHONPATH=f"{tmp_path}:{ROOT}"), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    took_s = time.monotonic() - began_s
    assert done.returncode == 75, done.stdout + done.stderr
    assert took_s < 45, done.stdout
    found = rows(tmp_path / "slow")
    newest = (tmp_path / "slow" / "checkpoints" / "latest").read_text().strip()
    assert int(newest.removeprefix("step-")) == found[-1]["step"] > 30
    assert [row["step"] for row in found if "eval_loss" in row][:1] == [30]


def test_a_rank_alone_keeps_the_time_limit_of_its_slurm_job(tmp_path: Path) -> None:
    env = clean_environment(SLURM_JOB_END_TIME=str(int(time.time()) + 25))
    done = subprocess.run(
        [sys.executable, "-m", "train", "run", *SMALL, "--strategy.name", "baseline", "--train.steps", "10000000",
         "--runs-dir", str(tmp_path), "--run-id", "alone"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done.stdout + done.stderr
    assert "s are needed to save before the time limit" in done.stdout + done.stderr


def test_an_evaluation_that_a_stop_came_before_is_made_up(tmp_path: Path) -> None:
    """Asked to stop within a step that is to be evaluated: it saves at once, and evaluates when it goes on."""
    flags = ("--strategy.name", "baseline", "--train.steps", "400", "--train.eval_every", "1")
    command = [sys.executable, "-m", "train", "run", *SMALL, *flags, "--runs-dir", str(tmp_path), "--run-id", "r"]
    first = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True)
    path = tmp_path / "r" / "metrics.jsonl"
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 3, first)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(60) == 75
    stopped_at = rows(tmp_path / "r")[-1]["step"]
    assert 1 < stopped_at < 400
    assert [row["step"] for row in rows(tmp_path / "r") if "eval_loss" in row][-1] == stopped_at - 1
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, timeout=120)
    found = [(row["step"], "eval_loss" in row) for row in rows(tmp_path / "r")]
    assert found == [(step, evaluated) for step in range(1, 401) for evaluated in (False, True)]


# The drill itself can fail.


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    finished(agent(folder, "one", 2, "--config", "ddp", "--train.steps", "130", "--train.log_samples", "true"))
    return folder / "one"


def _twin(run: Path, into: Path) -> Path:
    import shutil

    shutil.copytree(run, into)
    return into


def _edit(path: Path, line: int, change: Callable[[dict[str, Any]], object]) -> None:
    found = rows(path.parent, path.name)
    change(found[line])
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def test_what_differs_is_found(run_folder: Path, tmp_path: Path) -> None:
    same.compare(run_folder, _twin(run_folder, tmp_path / "same"), 2)
    other = _twin(run_folder, tmp_path / "loss")
    _edit(other / "metrics.jsonl", 5, lambda row: row.update(loss=row["loss"] + 1e-9))
    with pytest.raises(same.NotTheSameError, match=r"rows of metrics\.jsonl"):
        same.compare(run_folder, other, 2)
    other = _twin(run_folder, tmp_path / "ids")
    _edit(other / "samples" / "rank1.jsonl", 7, lambda row: row["ids"].reverse())
    with pytest.raises(same.NotTheSameError, match="rank 1 did not see the same samples"):
        same.compare(run_folder, other, 2)
    twice = _twin(run_folder, tmp_path / "twice")
    _edit(
        twice / "samples" / "rank0.jsonl",
        3,
        lambda row: row["ids"].__setitem__(0, rows(twice, "samples/rank0.jsonl")[0]["ids"][0]),
    )
    with pytest.raises(same.NotTheSameError, match="came twice in epoch 0"):
        same.count_samples(twice, 2)
    short = _twin(run_folder, tmp_path / "short")
    _edit(short / "samples" / "rank0.jsonl", 3, lambda row: row["ids"].pop())
    with pytest.raises(same.NotTheSameError, match="epoch 0 had 1437 of 1438 samples"):
        same.count_samples(short, 2)
    import torch

    from train.checkpoint import Checkpoints

    bit = _twin(run_folder, tmp_path / "bit")
    checkpoints = Checkpoints(bit / "checkpoints", keep=3)
    found = checkpoints.newest()
    assert found is not None
    weight = next(iter(found[0]["model"].values()))
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    checkpoints.save(130, found[0])
    with pytest.raises(same.NotTheSameError, match="final checkpoints of one and bit differ"):
        same.compare(run_folder, bit, 2)
