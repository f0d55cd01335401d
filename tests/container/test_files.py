"""The Compose files, locks and scripts as text: valid, and asking for no more rights than they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import ROOT, clean_environment

HOSTS = ("node0", "node1")


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_compose_file_is_valid(name: str) -> None:
    command = [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version" not in compose(name)


@pytest.mark.parametrize("service", [*HOSTS, "board"])
def test_containers_get_no_rights_they_do_not_need(service: str) -> None:
    found = compose("compose.yaml")["services"][service]
    assert found["cap_drop"] == ["ALL"]
    assert sorted(found["cap_add"]) == ["SETGID", "SETUID"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["read_only"] is True
    assert found["tmpfs"] == ["/tmp"]
    assert not {"privileged", "network_mode", "pid", "ipc"} & set(found)


def test_both_hosts_differ_in_name_and_rank_alone() -> None:
    first, second = (compose("compose.yaml")["services"][host] for host in HOSTS)
    assert second.pop("hostname") == "node1"
    assert second["environment"].pop("MUSTER_NODE_RANK") == "1"
    assert first.pop("hostname") == "node0"
    assert first["environment"].pop("MUSTER_NODE_RANK") == "0"
    assert first == second


def test_a_stop_grants_more_than_the_agents_grace() -> None:
    granted = compose("compose.yaml")["services"]["node0"]["stop_grace_period"]
    grace = re.search(r"--grace-s (\d+)", (ROOT / "docker/launch").read_text())
    assert grace is not None
    assert int(grace[1]) < int(granted.removesuffix("s"))


def test_gpus_asked_for_are_gpus_promised() -> None:
    for host in HOSTS:
        found = compose("compose.gpu.yaml")["services"][host]
        (device,) = found["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert found["environment"]["MUSTER_GPUS"] == found["environment"]["MUSTER_NPROC"]
        assert found["ipc"] == "host"
        assert found["ulimits"]["memlock"] == -1


def lock(flavour: str) -> dict[str, str]:
    text = (ROOT / f"docker/locks/{flavour}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)(?: ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))


@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_locks_hold_what_is_tested_with_hashes(flavour: str) -> None:
    locked = lock(flavour)
    text = (ROOT / f"docker/locks/{flavour}.txt").read_text()
    assert len(locked) == len(re.findall(r"^\S+==", text, re.MULTILINE))  # none without a hash
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    differs = {name: version for name, version in locked.items() if tested.get(name, version) != version}
    assert differs == ({"torch": f"{tested['torch']}+cpu"} if flavour == "cpu" else {})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[>=\[ ]", line)[0] for line in project["dependencies"]}
    assert needed <= set(locked), "make image-lock"


def test_only_the_cuda_lock_brings_cuda() -> None:
    assert [name for name in lock("cpu") if name.startswith(("nvidia-", "cuda-", "triton"))] == []
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas", "triton"} <= set(lock("cuda"))


@pytest.mark.parametrize("change", ["", "tracked", "untracked", "ignored"])
def test_the_revision_says_whether_it_is_just_that(change: str, tmp_path: Path) -> None:
    """docker/build in a repository of its own; in Docker's place stands a script that notes what it is asked."""
    clone, notes, bin_ = tmp_path / "clone", tmp_path / "asked", tmp_path / "bin"
    (clone / "docker/locks").mkdir(parents=True)
    bin_.mkdir()
    for name in ("docker/build", "docker/find-docker", "docker/locks/cpu.txt"):
        shutil.copy(ROOT / name, clone / name)
    (clone / ".gitignore").write_text("build/\n")
    (bin_ / "docker").write_text(f'#!/bin/sh\necho "Docker version 20.10.24 $*" | tee -a {notes}\necho \'"purl"\'\n')
    (bin_ / "docker").chmod(0o755)
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    if change:
        name = {"tracked": "docker/locks/cpu.txt", "untracked": "docker/new", "ignored": "build/old"}[change]
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("changed")
    env = clean_environment(PATH=f"{bin_}:{os.environ['PATH']}", BASE_IMAGE="base", CA="", WHEELS=str(tmp_path))
    subprocess.run(["docker/build", "cpu"], cwd=clone, env=env, check=True, capture_output=True)
    (revision,) = set(re.findall(r"REVISION=(\S+)", notes.read_text()))
    assert revision == commit + ("-dirty" if change in ("tracked", "untracked") else "")
