"""Our own training under the node agent, on one host: stopped by name, gone on with, explained, started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, weights_digest

TINY = [
    "--config=ddp", "--model.name=mlp", "--data.name=classification", "--batch.global_size=8",
    "--train.tensorboard=false", "--train.log_every=1",
]  # fmt: skip


def start(runs: Path, *flags: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """An agent with two ranks of the run `my-run`."""
    agent = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node=2", f"--runs-dir={runs}"]
    return subprocess.Popen(
        [*agent, "--run-id=my-run", *options, "--", "run", *TINY, *flags],
        env=clean_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """`python -m train …`."""
    return subprocess.run(
        [sys.executable, "-m", "train", *words],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Poll, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.05)


def steps_of(run: Path) -> int:
    """Rows of losses so far."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def ranks_of(agent: subprocess.Popen[str]) -> list[int]:
    """Process ids of an agent's ranks, in rank order."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    found = []
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((int(e[5:]) for e in environment if e.startswith(b"RANK=")), None)
        if rank is not None:
            found.append((rank, int(pid)))
    return [pid for _, pid in sorted(found)]


@pytest.mark.slow
def test_stopped_by_name_it_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    agent = start(tmp_path, "--train.steps=2000000")
    until(lambda: steps_of(run) > 5)
    stopped = command("stop", "my-run", "--runs-dir", str(tmp_path))
    output, _ = agent.communicate(timeout=60)
    assert (stopped.returncode, agent.returncode) == (0, 75), output
    verdict = json.loads((run / "verdict.json").read_text())
    step = verdict["step"]
    assert (verdict["outcome"], verdict["exit_code"]) == ("stopped", 75)
    assert verdict["cause"].startswith("stopped by the STOP file")
    assert output.splitlines()[-1] == f"muster: {verdict['cause']}"
    assert not (run / "STOP").exists()
    explained = command("explain", "my-run", "--runs-dir", str(tmp_path))
    assert verdict["cause"] in explained.stdout

    more = ("--train.steps", str(step + 7), "--optim.schedule=constant", "--optim.warmup_steps=0")
    again = start(tmp_path, *more)
    output, _ = again.communicate(timeout=90)
    assert again.returncode == 0, output
    assert f"step {step}" in output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, step + 8))
    refused = command("stop", "my-run", "--runs-dir", str(tmp_path))
    assert refused.returncode == 2
    assert "nothing to stop" in refused.stderr


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    """Killed after a checkpoint, gone on with by the agent: the weights are those of a run nobody touched."""
    flags = ("--train.steps=400", "--train.save_every=50", "--train.keep_checkpoints=20")
    untouched = start(tmp_path / "a", *flags)
    output, _ = untouched.communicate(timeout=120)
    assert untouched.returncode == 0, output
    agent = start(tmp_path / "b", *flags, options=("--max-restarts=1",))
    run = tmp_path / "b" / "my-run"
    until((run / "checkpoints" / "step-00000100" / "manifest.json").exists)
    os.kill(ranks_of(agent)[1], signal.SIGKILL)
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    assert "starting again (1 of 1)" in output
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "start"]
    assert len({event["start_id"] for event in starts}) == len({event["master_port"] for event in starts}) == 2
    assert weights_digest(run) == weights_digest(tmp_path / "a" / "my-run")


@pytest.mark.slow
def test_a_bad_config_is_refused_once_with_exit_code_2_and_leaves_nothing(tmp_path: Path) -> None:
    agent = start(tmp_path, "--train.stepz=3", options=("--max-restarts=3",))
    output, _ = agent.communicate(timeout=60)
    assert agent.returncode == 2
    assert "train.stepz" in output.splitlines()[-1]
    assert "starting again" not in output
    assert list(tmp_path.iterdir()) == []


def test_under_nohup_the_end_of_the_terminal_stops_nothing(tmp_path: Path) -> None:
    """Neither while its modules are loaded nor later."""
    agent = [sys.executable, "-m", "train", "node", "--standalone", "--", "sh", "-c", "sleep 1; echo went on"]
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "nohup", *agent]
    env = clean_environment(MUSTER_RUNS_DIR=str(tmp_path))
    with subprocess.Popen(nohup, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        time.sleep(0.05)  # till the shell heeds it no more
        while started.poll() is None:
            started.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        assert started.stdout is not None
        said = started.stdout.read()
    assert (started.returncode, said.splitlines()[-1]) == (0, "muster: finished"), said
    assert "went on" in said
