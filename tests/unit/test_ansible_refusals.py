"""`ansible-playbook launch.yml` with what cannot be: refused on this machine, before any host is looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment

ANSIBLE = Path(sys.executable).parent / "ansible-playbook"
pytestmark = [
    pytest.mark.skipif(not ANSIBLE.exists() and "CI" not in os.environ, reason="needs ansible: make venv"),
    pytest.mark.slow,
]
INVENTORY = """
nodes:
  vars: {ansible_user: nobody, ansible_ssh_timeout: 1}
  hosts:
    big: {slots: 4, ansible_host: 203.0.113.1, address: "fd00::1"}
    a: {slots: 2, ansible_host: 203.0.113.2}
    b: {slots: 2, ansible_host: 203.0.113.3}
"""  # of documentation (RFC 5737): nobody is there


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY)
    return path


def play(inventory: Path, playbook: str, *args: str) -> tuple[int, list[str], float]:
    """Exit code, the lines behind the recap, seconds."""
    env = {**clean_environment(), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(inventory.parent / "home")}
    started = time.monotonic()
    done = subprocess.run(
        [ANSIBLE, "-i", inventory, playbook, *args], cwd=ROOT / "ansible", env=env, text=True, timeout=120,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert "PLAY RECAP" in done.stdout, done.stdout
    told = done.stdout[done.stdout.index("PLAY RECAP") :].split("\n\n", 1)[1].strip().splitlines()
    assert "UNREACHABLE" not in done.stdout, done.stdout
    return done.returncode, told, time.monotonic() - started


def test_everything_that_is_wrong_is_told_at_once(inventory: Path) -> None:
    more = {"nodes": 4, "timelimit": 3600, "overrides": "--optim.lrr 1 --batch.global_size 7", "runtime": "podman"}
    code, told, _ = play(inventory, "launch.yml", "-e", json.dumps(more))
    assert code == 2
    assert told == [
        "muster: nothing was started (exit code 2: bad config or usage, nothing was trained):",
        "  timelimit: no such variable; did you mean time_limit?",
        "  nodes: 4 are asked for, but there are 3: big, a, b",
        "  runtime: 'podman' must be one of docker, venv",
        *told[4:],
    ]
    assert [line for line in told[4:] if "optim.lrr: no such field; did you mean optim.lr?" in line]


@pytest.mark.parametrize(
    ("playbook", "args", "words"),
    [
        ("launch.yml", ["-e", "nodes=two"], "  nodes: 'two' must be a whole number from 1 to 1e+09"),
        ("launch.yml", ["-f", "2"], "  forks: 2 hosts are watched at a time, but there are 3: add -f 3"),
        ("launch.yml", ["--limit", "a,b", "-e", "nodes=3"], "  nodes: 3 are asked for, but there are 2: a, b"),
        ("status.yml", ["-e", "folow=true"], "  folow: no such variable; did you mean follow?"),
        ("stop.yml", ["-e", "runid=x"], "  runid: no such variable; did you mean run_id?"),
        (
            "launch.yml", ["-e", "script=python my.py"],
            "  -e: 'my.py' is no NAME=value; a value with blanks has quotes of its own: -e 'script=\"python my.py\"'",
        ),
        ("collect.yml", ["-e", "muster_imgae=x"], "  muster_imgae: no such variable; did you mean muster_image?"),
    ],
)  # fmt: skip
def test_one_thing(inventory: Path, playbook: str, args: list[str], words: str) -> None:
    code, told, took_s = play(inventory, playbook, *args)
    assert (code, told[1:]) == (2, [words])
    print(f"{playbook} {' '.join(args)}: refused in {took_s:.1f} s")


def test_a_misspelt_variable_of_the_inventory(inventory: Path) -> None:
    inventory.write_text(INVENTORY.replace("slots: 4,", "slots: 4, muster_imgae: x,"))
    words = ["  muster_imgae: no such variable (inventory, big); did you mean muster_image?"]
    code, told, _ = play(inventory, "launch.yml")
    assert (code, told[1:]) == (2, words)


def test_the_filter_plans_as_the_command_does(inventory: Path, tmp_path: Path) -> None:
    book = tmp_path / "plan.yml"
    book.write_text(
        "- hosts: nodes\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.copy:\n"
        "        content: '{{ ansible_play_hosts_all | muster_plan(hostvars) | to_json }}'\n"
        f"        dest: {tmp_path}/plan.json\n        mode: '0644'\n"
        "      delegate_to: localhost\n      connection: local\n      run_once: true\n"
    )
    env = {**clean_environment(), "ANSIBLE_FILTER_PLUGINS": str(ROOT / "ansible" / "filter_plugins")}
    subprocess.run([ANSIBLE, "-i", inventory, book], env=env, check=True, capture_output=True, timeout=120)
    command = [sys.executable, "-m", "train", "plan", "--inventory", str(inventory), "--json"]
    planned = subprocess.run(command, env=clean_environment(), check=True, capture_output=True, text=True)
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(planned.stdout)
