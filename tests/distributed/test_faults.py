"""What goes wrong between ranks is told in plain words, with the right exit code, and nothing good is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import clean_environment, free_port, rank_environment, run_together, train, train_ranks, weights_digest

SMALL = (
    "run", "--strategy.name=ddp", "--model.name=mlp", "--data.name=classification", "--batch.global_size=16",
    "--train.tensorboard=false", "--train.log_every=1",
)  # fmt: skip


def test_a_rank_that_never_comes_is_named_within_the_join_timeout(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "train", *SMALL, "--train.steps=3", "--runtime.join_timeout_s=7"]
    present = [0, 2]
    done = run_together(
        [command] * 2, [clean_environment(**rank_environment(rank, 3, port)) for rank in present], cwd=tmp_path
    )
    assert [process.returncode for process in done] == [4, 4]
    for process in done:
        assert "rank 1 of 3 did not join within 7 s; rank 0 (" in process.stdout
        assert "Traceback" not in process.stdout


def test_a_rank_without_rank_0_says_where_it_looked(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--rank", "1", "--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    done = train(*SMALL, "--train.steps=3", "--runtime.join_timeout_s=2", *flags, cwd=tmp_path)
    assert done.returncode == 4
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 2 s" in done.stdout


def test_a_port_in_use_is_said_by_rank_0(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ("--rank", "0", "--world-size", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        done = train(*SMALL, "--train.steps=3", "--runtime.join_timeout_s=2", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} is already in use on " in done.stdout


def _two_hosts(tmp_path: Path, *words: str, of_a_host: str = "") -> list[subprocess.CompletedProcess[str]]:
    """Two ranks, each in a folder and with a cache of its own; `of_a_host` is one more word, `{rank}` filled in."""
    port = free_port()
    commands, environments = [], []
    for rank in (0, 1):
        folder = tmp_path / f"host{rank}"
        more = [of_a_host.format(rank=rank)] if of_a_host else []
        commands.append(["env", "-C", str(folder), sys.executable, "-m", "train", *words, *more])
        environments.append(clean_environment(**rank_environment(rank, 2, port), XDG_CACHE_HOME=str(folder)))
    return run_together(commands, environments)


def test_hosts_with_different_data_and_options_are_named(tmp_path: Path) -> None:
    """Each host has a text file of its own at the same relative path, and another learning rate."""
    for rank in (0, 1):
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}" / "text.txt").write_text(f"text of host {rank} " * 100)
    text = ("--data.paths=[text.txt]", "--data.block_size=8", "--train.steps=3", "--batch.global_size=4")
    done = _two_hosts(tmp_path, "run", "--strategy.name=ddp", *text, of_a_host="--optim.lr=0.01{rank}")
    assert [process.returncode for process in done] == [2, 2]
    for process in done:
        assert "data differs between ranks: " in process.stdout
        assert "on rank 0 (" in process.stdout
        assert "on rank 1 (" in process.stdout
        assert "optim.lr differs between ranks: 0.01 on rank 0 (" in process.stdout
    assert not list(tmp_path.glob("*/runs/*"))


def test_a_file_missing_on_one_host_ends_all_ranks_and_names_it(tmp_path: Path) -> None:
    """Only the first host has the module with the model."""
    for rank in (0, 1):
        (tmp_path / f"host{rank}").mkdir()
    (tmp_path / "host0" / "own_here.py").write_text("import torch\ndef model():\n    return torch.nn.Linear(10, 5)\n")
    done = _two_hosts(tmp_path, *SMALL, "--model.name=own_here:model")
    assert [process.returncode for process in done] == [2, 2]
    for process in done:
        assert "rank 1 (" in process.stdout
        assert "model.name: no module 'own_here' here" in process.stdout
    assert not list(tmp_path.glob("*/runs/*"))


def test_a_loss_that_is_no_number_names_step_rank_and_samples(tmp_path: Path) -> None:
    (tmp_path / "own_nan.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))\n"
        "    y = x.sum(1, keepdim=True)\n"
        "    x[37] = float('inf')\n"
        "    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])\n"
        "def model():\n"
        "    return torch.nn.Linear(4, 1)\n"
    )
    own = ("--data.name=own_nan:data", "--model.name=own_nan:model", "--batch.global_size=8", "--train.epochs=1")
    done = train_ranks(
        2,
        "run",
        "--strategy.name=ddp",
        *own,
        "--train.save_every=1",
        "--run-id=nan",
        cwd=tmp_path,
        PYTHONPATH=_path(tmp_path),
    )
    assert [process.returncode for process in done] == [5, 5]
    from train.data import Order

    order = Order(64, 8, seed=1337)
    step = next(index for index in range(8) if 37 in order.batch(index).tolist()) + 1
    place = order.batch(step - 1).tolist().index(37)
    message = f"at step {step} on rank {place // 4} ("
    assert message in done[0].stdout, done[0].stdout
    share = order.batch(step - 1).tolist()[place // 4 * 4 :][:4]
    assert f"samples {', '.join(map(str, share))} of global batch {step - 1}" in done[0].stdout
    newest = (tmp_path / "runs" / "nan" / "checkpoints" / "latest").read_text().strip() if step > 1 else None
    assert newest == (f"step-{step - 1:08}" if step > 1 else None)
    verdict = json.loads((tmp_path / "runs" / "nan" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 5)


@pytest.mark.slow
def test_replicas_that_drift_apart_name_tensor_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "own_drift.py").write_text(
        "import os, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))\n"
        "    return TensorDataset(x, x[:, :1]), TensorDataset(x[:8], x[:8, :1])\n"
        "class Drift(torch.nn.Sequential):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls == 3:\n"
        "            self[1].bias.data += 1e-6\n"
        "        return super().forward(x)\n"
        "def model():\n"
        "    return Drift(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))\n"
    )
    own = ("--data.name=own_drift:data", "--model.name=own_drift:model", "--batch.global_size=8", "--train.epochs=1")
    check = ("--train.check_replicas_every=4",)
    done = train_ranks(2, "run", "--strategy.name=manual", *own, *check, cwd=tmp_path, PYTHONPATH=_path(tmp_path))
    assert [process.returncode for process in done] == [5, 5]
    assert "replicas differ after step 4: 1 of 4 parameters, the first is 1.bias; rank 1 (" in done[0].stdout


@pytest.mark.slow
def test_a_rank_that_dies_leaves_words_with_the_others(tmp_path: Path) -> None:
    done = _interfere(tmp_path, lambda ranks: ranks[1].kill())
    assert done[1][0] == -signal.SIGKILL
    code, output = done[0]
    assert code == 5
    assert "lost contact with another rank in step" in output
    assert "that one ended first" in output


@pytest.mark.slow
def test_a_stop_request_saves_and_the_same_command_ends_with_the_same_bits(tmp_path: Path) -> None:
    """SIGTERM to one rank alone: all stop at the same step with 75; run again it is as if nothing had happened."""
    words = [*SMALL, "--train.steps=400", "--runs-dir", str(tmp_path / "runs")]
    stopped = _interfere(tmp_path, lambda ranks: ranks[1].terminate())
    assert [code for code, _ in stopped] == [75, 75], stopped[0][1]
    (run,) = (tmp_path / "runs").iterdir()
    verdict = json.loads((run / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("stopped", 75)
    assert 0 < verdict["step"] < 400
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{verdict['step']:08}"
    resumed = train_ranks(2, *words, cwd=tmp_path)
    assert [process.returncode for process in resumed] == [0, 0]
    assert f"going on from step {verdict['step']} of 400" in resumed[0].stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if steps.count(step) == 1 or step == 400] == [*range(1, 400), 400, 400]
    untouched = train_ranks(2, *words, "--run-id", "untouched", cwd=tmp_path)
    assert [process.returncode for process in untouched] == [0, 0]
    assert weights_digest(run) == weights_digest(tmp_path / "runs" / "untouched")


def _path(folder: Path) -> str:
    return f"{folder}{os.pathsep}{Path(__file__).parents[2]}"


def _interfere(folder: Path, act: object) -> list[tuple[int, str]]:
    """Start two ranks of a long run, `act` on them once ten steps are done; their exit codes and output."""
    port = free_port()
    command = [sys.executable, "-m", "train", *SMALL, "--train.steps=400", "--runs-dir", str(folder / "runs")]
    ranks = [
        subprocess.Popen(
            command, cwd=folder, env=clean_environment(**rank_environment(rank, 2, port)), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl")) < 10:
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        act(ranks)  # type: ignore[operator]
        return [(rank.returncode, output) for rank in ranks for output in [rank.communicate(timeout=60)[0]]]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_after_the_step_timeout(tmp_path: Path) -> None:
    (tmp_path / "own_hang.py").write_text(
        "import os, time, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))\n"
        "    return TensorDataset(x, x[:, :1]), TensorDataset(x[:8], x[:8, :1])\n"
        "class Slow(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls == 3:\n"
        "            time.sleep(12)\n"
        "        return super().forward(x)\n"
        "def model():\n"
        "    return Slow(4, 1)\n"
    )
    own = ("--data.name=own_hang:data", "--model.name=own_hang:model", "--batch.global_size=8", "--train.epochs=1")
    done = train_ranks(
        2, "run", "--strategy.name=ddp", *own, "--runtime.step_timeout_s=4", cwd=tmp_path, PYTHONPATH=_path(tmp_path)
    )
    assert done[0].returncode == 6
    assert "waited in vain for other ranks in step 3" in done[0].stdout
