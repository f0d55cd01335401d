"""What a disk does to checkpoints for real: full, read-only, somebody else's. In a mount namespace; needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts and other users need root"),
]

TRAIN = (
    "--strategy.name", "baseline", "--model.name", "mlp", "--data.name", "digits", "--data.val_fraction", "0.2",
    "--batch.global_size", "32", "--train.tensorboard", "false", "--train.save_every", "10", "--train.steps", "40",
)  # fmt: skip


def run(runs: Path, *flags: str, before: str = "true", prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Train in a mount namespace of its own, after a line of shell."""
    command = [sys.executable, "-m", "train", "run", *TRAIN, "--runs-dir", str(runs), "--run-id", "r", *flags]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *prefix, *command],
        cwd=ROOT, env=clean_environment(RUNS=str(runs)), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def saved(runs: Path) -> list[str]:
    return sorted(path.name for path in (runs / "r" / "checkpoints").glob("step-*"))


def test_a_disk_that_is_too_small_ends_the_run_after_three_saves_with_the_words_why(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = run(tmp_path / "runs", "--model.width", "2000", before='mount -t tmpfs -o size=100k tmpfs "$RUNS"')
    said = done.stdout + done.stderr
    assert done.returncode == 5, said
    for step, count in ((10, 1), (20, 2), (30, 3)):
        assert f"cannot save step {step} in " in said
        assert f"older checkpoints stay, training goes on ({count} of 3)" in said
    assert "the disk is full: it takes" in said
    assert "3 saves in a row have failed; the last: cannot save step 30" in said


def test_a_disk_that_fills_up_in_mid_save_costs_that_save_alone(tmp_path: Path) -> None:
    """Room is looked for first; a disk that lies about it is the one that fills in between."""
    script = f"""
import shutil, sys, torch
from pathlib import Path
from train.checkpoint import Checkpoints
from train.errors import CheckpointError
class Usage: free = 1 << 40
checkpoints = Checkpoints(Path({str(tmp_path)!r}) / "disk" / "checkpoints", keep=1)
checkpoints.save(1, {{"model": torch.ones(20_000)}})
shutil.disk_usage = lambda _: Usage
try:
    checkpoints.save(2, {{"model": torch.ones(200_000)}})
except CheckpointError as error:
    print(error)
shutil.disk_usage = lambda _: Usage
print(sorted(p.name for p in checkpoints.folder.iterdir()))
state, path, damaged = checkpoints.newest()
print(path.name, float(state["model"].sum()), damaged)
checkpoints.save(3, {{"model": torch.ones(20_000)}})
print([p.name for p in checkpoints.saved()])
"""
    (tmp_path / "disk").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=400k tmpfs "$0" && exec "$@"',
         str(tmp_path / "disk"), sys.executable, "-c", script],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"cannot save step 2 in {tmp_path}/disk/checkpoints: the disk is full, or failing",
        "['latest', 'step-00000001']",
        "step-00000001 20000.0 []",
        "['step-00000003']",
    ], done.stdout + done.stderr


def test_a_folder_that_has_become_read_only_is_told_and_what_was_saved_is_taken_up_later(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert run(runs, "--train.steps", "10").returncode == 0
    (runs / "r" / "verdict.json").unlink()
    before = (
        'mount --bind "$RUNS/r/checkpoints" "$RUNS/r/checkpoints" && mount -o remount,bind,ro "$RUNS/r/checkpoints"'
    )
    done = run(runs, before=before)
    said = done.stdout + done.stderr
    assert "going on from step 10 of 40" in said
    assert f"cannot save step 20 in {runs}/r/checkpoints: the file system is mounted read-only" in said
    assert done.returncode == 5, said
    assert saved(runs) == ["step-00000010"]
    done = run(runs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from step 10 of 40" in done.stdout + done.stderr
    assert json.loads((runs / "r" / "verdict.json").read_text())["outcome"] == "finished"


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users reach: pytest's own is closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_checkpoint_of_somebody_else_is_named_with_its_owner_and_goes_on_when_it_is_given_back(
    open_to_all: Path,
) -> None:
    """It may be good: to take the one before would cost ten steps, and in the end this one as well."""
    runs = open_to_all / "runs"
    assert run(runs, "--train.steps", "20").returncode == 0
    (runs / "r" / "verdict.json").unlink()
    for path in [runs, *runs.rglob("*")]:
        os.chown(path, 4321, 4321)
    file = runs / "r" / "checkpoints" / "step-00000020" / "state.pt"
    os.chown(file, 0, 0)
    file.chmod(0o600)
    user = ["setpriv", "--reuid", "4321", "--regid", "4321", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    done = run(runs, prefix=user)
    said = done.stdout + done.stderr
    assert f"user 4321 may not touch {file} (it belongs to user 0): start the job as its owner, or chown it" in said
    assert "no older one is taken" in said
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert saved(runs) == ["step-00000010", "step-00000020"]
    os.chown(file, 4321, 4321)
    done = run(runs, prefix=user)
    said = done.stdout + done.stderr
    assert "going on from step 20 of 40" in said
    assert done.returncode == 0, said


def test_a_bad_sector_in_the_newest_is_told_and_it_goes_on_from_the_one_before_when_that_is_given_up(
    tmp_path: Path,
) -> None:
    """A real EIO: /proc/PID/mem cannot be read at its beginning. Nothing of it is judged damaged."""
    runs = tmp_path / "runs"
    assert run(runs, "--train.steps", "20").returncode == 0
    (runs / "r" / "verdict.json").unlink()
    newest = runs / "r" / "checkpoints" / "step-00000020"
    done = run(runs, before=f'mount --bind /proc/$$/mem "{newest}/state.pt"')
    said = done.stdout + done.stderr
    assert f"{newest} cannot be read, but may be good: OSError: [Errno 5] Input/output error" in said
    assert done.returncode == 2, said
    assert saved(runs) == ["step-00000010", "step-00000020"]
    newest.rename(tmp_path / "given up")
    done = run(runs)
    assert "going on from step 10 of 40" in done.stdout + done.stderr
    assert done.returncode == 0
