"""What makes a Slurm job's hosts unfit, told by each and judged together; nobody waits for ever for an answer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import tools
from train.launch import slurm_check

FIT = {
    "node": "n1", "cpus": 8, "memlock_mb": None, "shm_mb": 64000, "gpus_given": 2, "gpus_seen": 2, "runs": None,
    "free_mb": 9999, "credential": "Success", "ahead_s": 0.1, "mute": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "words", "is_bad"),
    [
        ({}, "", True),
        ({"ahead_s": -90.0}, "its clock is 90 s behind", True),
        ({"ahead_s": 5.0}, "its clock is 5 s ahead", False),
        ({"credential": "Invalid credential"}, "munge: Invalid credential: give all hosts the same", True),
        ({"credential": ""}, "", True),
        ({"runs": "Permission denied"}, "the run folder: Permission denied", True),
        ({"free_mb": 12}, "has 12 MB free", True),
        ({"cpus": 1}, "use 1 cores, not the 8", True),
        ({"gpus_seen": 1}, "Slurm gave it 2 GPUs, but the driver shows 1", True),
        ({"gpus_seen": None}, "there is no nvidia-smi", True),
        ({"memlock_mb": 0}, "locked memory is limited to 0 MB", False),
        ({"shm_mb": 64}, "64 MB: little", False),
        ({"mute": ["nvidia-smi"], "gpus_seen": 0}, "nvidia-smi did not answer within 20 s", True),
    ],
)
def test_what_makes_a_host_unfit(other: dict[str, Any], words: str, is_bad: bool) -> None:
    bad, notes = slurm_check.problems_of({**FIT, **other}, {"cpus": 8, "device": "cuda"})
    assert len(bad) == (1 if words and is_bad else 0)
    assert len(notes) == (1 if words and not is_bad else 0)
    assert words in "".join(bad + notes)


def test_hosts_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    problems = slurm_check.judge([FIT], ["n2"], {"cpus": 8, "device": "cuda"})
    assert [problem.partition(":")[0] for problem in problems] == ["n2"]
    assert "n1: 8 cores, 2 GPUs, clock +0.1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "silent"),
    [
        ("srun: error: Task launch for StepId=7.0 failed on node n2: Zero Bytes were transmitted or received", ["n2"]),
        ("srun: error: n1: task 0: Killed", ["n1", "n2"]),
    ],
)
def test_hosts_on_which_srun_ends_the_check_because_of_another_are_not_blamed(
    said: str, silent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an `srun` of ours, which says what Slurm 22.05 said where a node had another munge key."""
    tools(tmp_path, monkeypatch, srun=f"echo '{said}' >&2\nexit 1")
    assert slurm_check.ask_all(["n1", "n2"], 1) == ([], silent)
    assert said in capsys.readouterr().err


def test_what_a_host_tells_of_itself(tmp_path: Path) -> None:
    told = slurm_check.found_here({"MUSTER_RUNS_DIR": str(tmp_path / "runs"), "SLURMD_NODENAME": "n1"})
    assert told["node"] == "n1"
    assert told["cpus"] == len(os.sched_getaffinity(0))
    assert told["runs"] is None
    assert told["free_mb"] > 0
    (tmp_path / "file").touch()
    assert slurm_check.found_here({"MUSTER_RUNS_DIR": str(tmp_path / "file/runs")})["runs"] == "Not a directory"


def test_what_is_no_answer_is_passed_on_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prolog or a module's greeting also writes to a task's standard output."""
    told = json.dumps({"node": "n1", "time": time.time(), "credential": ""})
    lines = ["Welcome to the cluster!", "", "[1]", "{}", "5", told]
    tools(tmp_path, monkeypatch, srun="\n".join(f"echo '{line}'" for line in lines))
    rows, silent = slurm_check.ask_all(["n1"], 1)
    assert [(row["node"], abs(row["ahead_s"]) < 30, row["credential"]) for row in rows] == [("n1", True, "")]
    assert silent == []
    assert "Welcome to the cluster!\n" in capsys.readouterr().err


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM\n"])
def test_hosts_that_never_answer_are_not_waited_for(
    stubborn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.dumps({"node": "n1", "time": 0, "credential": ""})
    wait = "while :; do read -t 1 x <>/dev/ptmx; done" if stubborn else "exec sleep 120"
    tools(tmp_path, monkeypatch, srun=f"{stubborn}echo '{told}'\n{wait}")
    began_s = time.monotonic()
    rows, silent = slurm_check.ask_all(["n1", "n2"], 1, timeout_s=0.5)
    assert time.monotonic() - began_s < 30
    assert ([row["node"] for row in rows], silent) == (["n1"], ["n2"])


def test_a_tool_that_never_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_check, "TOOL_S", 0.2)
    tools(
        tmp_path, monkeypatch, **{"nvidia-smi": "exec sleep 60", "munge": "exec sleep 60", "unmunge": "exec sleep 60"}
    )
    told = slurm_check.found_here({"MUSTER_RUNS_DIR": str(tmp_path / "runs")})
    assert (told["mute"], told["gpus_seen"], told["credential"]) == (["nvidia-smi", "munge"], 0, "")
    assert slurm_check._unmunged("x") == "no answer"
