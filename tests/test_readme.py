"""README is true: its commands run, its links lead somewhere, its example is the one that is tested."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, run_together

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
ELSEWHERE = {
    "make demo": "test_demo.py runs what it runs",
    "make test": "this is it",
    "srun --ntasks-per-node 2 python -m train run --config ddp": "needs a cluster; test_identity.py has its variables",
}


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_the_example_is_the_tested_one_and_short() -> None:
    example = (ROOT / "tests" / "spirals.py").read_text()
    assert f"```python\n{example}```" in README
    assert len(example.splitlines()) < 40


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE and "--rank" not in c])
def test_a_command_of_readme_runs(command: str, tmp_path: Path) -> None:
    is_own = command.startswith("cd tests && ")
    words = shlex.split(command.removeprefix("cd tests && "))
    if words[0] == "mpirun":
        if not shutil.which("mpirun") and "CI" not in os.environ:
            pytest.skip("mpirun is missing: apt-get install openmpi-bin")
        words[1:1] = ["--allow-run-as-root", "--oversubscribe"]
    words = [sys.executable if word == "python" else word for word in words]
    if words[0] == "torchrun":
        words = [str(Path(sys.executable).parent / "torchrun"), "--standalone", *words[1:]]
    if "--train.epochs" not in words and "--print_config" not in words:
        words += ["--train.steps", "3", "--train.sample_tokens", "8"]
    words += [] if "--print_config" in words else ["--runs-dir", str(tmp_path), "--run-id", "readme"]
    (done,) = run_together([words], [clean_environment()], cwd=ROOT / "tests" if is_own else ROOT)
    assert done.returncode == 0, done.stdout
    if is_own:
        assert json.loads((tmp_path / "readme" / "summary.json").read_text())["eval_accuracy"] > 0.95


@pytest.mark.slow
def test_the_two_shells_of_readme_train_together(tmp_path: Path) -> None:
    commands = [shlex.split(command) for command in COMMANDS if "--rank" in command]
    assert len(commands) == 2
    more = ["--train.steps", "3", "--train.sample_tokens", "8", "--runs-dir", str(tmp_path), "--run-id", "readme"]
    done = run_together([[sys.executable, *words[1:], *more] for words in commands], [clean_environment()] * 2)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout


def test_every_command_elsewhere_is_still_in_readme() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS)
