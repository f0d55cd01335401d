"""The batch scripts as texts: every option is read by sbatch, they differ in what they are for, and stay short."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
NAMES = {"baseline", "dp", "ddp", "manual", "amp", "accumulation", "preflight", "script"}
DDP = (ROOT / "slurm/ddp.sbatch").read_text()


def options(text: str) -> dict[str, str]:
    """What sbatch reads: lines that start with `#SBATCH`, up to the first line that is a command (sbatch(1))."""
    found = {}
    for line in text.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            words = shlex.split(line[len("#SBATCH") :], comments=True)
            assert len(words) == 1, line
            name, _, value = words[0].partition("=")
            assert name not in found, line
            found[name] = value
        elif line.strip() and not line.startswith("#"):
            break
    return found


def test_there_is_one_for_each_recipe_and_two_more() -> None:
    assert {script.stem for script in SCRIPTS} == NAMES
    recipes = {path.stem for path in (ROOT / "train/recipes").glob("*.yaml")}
    assert NAMES - {"preflight", "script"} == recipes


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_option_is_lost_and_each_has_its_reason(script: Path) -> None:
    text = script.read_text()
    found = options(text)
    assert len(found) == len(re.findall("SBATCH --", text.replace("sbatch --", "")))
    assert list(found) == list(options(DDP))
    assert found["--job-name"] == f"muster-{script.stem}"
    assert found["--signal"] == "B:USR2@150"
    assert found["--open-mode"] == "append"
    assert found["--requeue"] == ""
    assert "/" not in found["--output"]  # a folder that is missing would swallow the log
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            assert re.fullmatch(r"#SBATCH --\S+ +# \S.*", line), line
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120


def test_they_diff_cleanly() -> None:
    for script in SCRIPTS:
        changed = [line for line in difflib.ndiff(DDP.splitlines(), script.read_text().splitlines()) if line[0] == "+"]
        assert len(changed) <= (6 if "--nodes=2" in script.read_text() else 9), script
        assert (
            script.read_text().split("# sbatch runs a copy")[1].rsplit("\n\n", 1)[0]
            == (DDP.split("# sbatch runs a copy")[1].rsplit("\n\n", 1)[0])
        )
        assert f"/{script.name} " in script.read_text()  # its own name in its example


def test_grace_is_what_the_signal_leaves_less_the_time_to_leave() -> None:
    from train.launch.slurm import GRACE_S, NEEDED_S

    assert int(options(DDP)["--signal"].rpartition("@")[2]) == GRACE_S + NEEDED_S


class TestCommonIsFound:
    """By the first lines of a script, as a spooled copy, with a scontrol that says where it was submitted."""

    def run(self, tmp_path: Path, command: str, submit_dir: Path, **env: str) -> str:
        spool, bin_dir = tmp_path / "spool", tmp_path / "bin"
        for folder in (spool, bin_dir):
            folder.mkdir(exist_ok=True)
        scontrol = bin_dir / "scontrol"
        scontrol.write_text(
            f"#!/bin/sh\ncat <<'END'\nJobId=7 JobName=a b\n   Command={command}\n   StdOut=/x/y z.out\nEND\n"
        )
        scontrol.chmod(0o755)
        copy = spool / "slurm_script"
        copy.write_text(DDP)
        environment = {**clean_environment(), "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(submit_dir), **env}
        environment["PATH"] = f"{bin_dir}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", str(copy), "--optim.lr", "a b"], env=environment, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        folder = tmp_path / "a checkout" / "slurm"
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "slurm/ddp.sbatch", folder)
        (folder / "common.sh").write_text('muster() { printf "<%s>" "$here" "$@"; }\n')
        return folder

    def test_from_any_folder_with_spaces_in_path_and_arguments(self, tmp_path: Path, checkout: Path) -> None:
        said = self.run(tmp_path, f"{checkout}/ddp.sbatch --x 'a b.sbatch'", Path("/"))
        assert said == f"<{checkout}><run><--config><ddp><--optim.lr><a b>"

    def test_through_a_symlink(self, tmp_path: Path, checkout: Path) -> None:
        (tmp_path / "mine.sbatch").symlink_to(checkout / "ddp.sbatch")
        assert f"<{checkout}>" in self.run(tmp_path, f"{tmp_path}/mine.sbatch", Path("/"))

    def test_of_a_script_read_from_standard_input_in_the_checkout(self, tmp_path: Path, checkout: Path) -> None:
        assert f"<{checkout}>" in self.run(tmp_path, "(null)", checkout.parent)
        assert f"<{checkout}>" in self.run(tmp_path, "(null)", checkout)

    def test_of_a_copy_elsewhere_by_a_variable(self, tmp_path: Path, checkout: Path) -> None:
        said = self.run(tmp_path, f"{tmp_path}/copy.sbatch", Path("/"), MUSTER_HOME=str(checkout.parent))
        assert f"<{checkout}>" in said

    def test_else_it_says_what_to_set(self, tmp_path: Path) -> None:
        assert "set MUSTER_HOME to the checkout" in self.run(tmp_path, f"{tmp_path}/copy.sbatch", Path("/"))

    def test_without_slurm_it_says_how_to_start_it(self) -> None:
        done = subprocess.run(
            ["bash", str(ROOT / "slurm/ddp.sbatch")],
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert "this is a batch script: sbatch" in done.stderr
