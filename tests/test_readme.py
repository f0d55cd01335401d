"""README is true: its commands run, its links lead somewhere, its example is the one that is tested."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks import ROOT, clean_environment, free_port, run_together

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
    "make image": "tests/container builds it, in two steps",
    "docker compose up": "tests/container/test_two_hosts.py, as are the next four",
    "MUSTER_CONFIG=amp docker compose up": "",
    "MUSTER_ARGS='--train.steps 30' docker compose up": "",
    "docker compose --profile board up": "",
    "docker/up": "",
    "make lab": "tests/lab/cluster.py makes such labs",
    "cd ansible": "tests/lab/test_ansible_launch.py runs what follows",
    **{command: "" for command in COMMANDS if command.startswith("ansible-playbook")},
    **{command: "tests/lab/test_fabric.py" for command in COMMANDS if command.startswith("fab ")},
    "head -c 32 /dev/urandom | base64 > secret; chmod 600 secret; export MUSTER_SECRET_FILE=secret": "the two hosts",
    "python -m train stop my-run": "tests/distributed/test_node.py",
    "python -m train explain my-run": "tests/distributed/test_node.py",
    "python -m train watch my-run": "tests/distributed/test_report.py",
    "python -m train report my-run": "tests/unit/test_report_page.py, as is the next one",
    "python -m train report first-run second-run third-run": "",
    "python -m train checkpoints ls my-run": "tests/unit/test_shelf.py, as are the next three",
    "python -m train checkpoints verify my-run": "",
    "python -m train checkpoints export my-run --output my-run.safetensors": "",
    "python -m train sample my-run --prompt 'Once upon a time'": "",
    "python -m train drill --config ddp --kills 5 --train.steps 200 --train.save_every 20": "test_nothing_lost.py",
    "python -m train pitfalls padded_evaluation": "tests/distributed/test_pitfalls.py",
    "sbatch slurm/ddp.sbatch --optim.lr 1e-3": "tests/lab/test_slurm.py, as are the next three",
    "sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 slurm/ddp.sbatch": "",
    "sbatch slurm/script.sbatch my_script.py --my-option 1": "",
    "sbatch slurm/preflight.sbatch": "",
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
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE and "-rank " not in c])
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
    if "node" in words:
        at = words.index("node") + 1
        words[at:at] = ["--runs-dir", str(tmp_path), "--run-id", "readme"]
    if "run" in words and "--train.epochs" not in words and "--print_config" not in words:
        words += ["--train.steps", "3", "--train.sample_tokens", "8"]
    if "run" in words and "node" not in words and "--print_config" not in words:
        words += ["--runs-dir", str(tmp_path), "--run-id", "readme"]
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


@pytest.mark.slow
def test_the_two_hosts_of_readme_train_together(tmp_path: Path) -> None:
    """Both agents on this machine, at its own address; the secret made by README's own line."""
    making = next(command for command in COMMANDS if command.startswith("head -c 32"))
    subprocess.run(["sh", "-c", making.partition("; export")[0]], cwd=tmp_path, check=True)
    here = next(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    )
    commands = []
    for command in (command for command in COMMANDS if "--nnodes 2" in command):
        words = [sys.executable, *shlex.split(command.replace("10.0.0.1", here))[1:]]
        words[4:4] = ["--runs-dir", str(tmp_path), "--run-id", "readme", "--master-port", str(free_port())]
        commands.append([*words, "--train.steps", "3", "--train.sample_tokens", "8"])
    port = commands[0][commands[0].index("--master-port") + 1]
    commands[1][commands[1].index("--master-port") + 1] = port
    environment = {**clean_environment(), "MUSTER_SECRET_FILE": str(tmp_path / "secret")}
    done = run_together(commands, [environment] * 2, timeout_s=120)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("readme/logs/*/*.log"))
    assert [re.sub("-.*/", "/", log.removeprefix("readme/logs/")) for log in logs] == [
        "node0/rank0.log",
        "node0/rank1.log",
        "node1/rank2.log",
        "node1/rank3.log",
    ]


def test_every_command_elsewhere_is_still_in_readme() -> None:
    assert set(ELSEWHERE) <= set(COMMANDS)
