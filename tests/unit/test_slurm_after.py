"""What becomes of a job when its agents have ended: only what can go on goes back, and never for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from train.launch import slurm_after, slurm_check
from train.launch.endings import how_it_stopped
from train.launch.slurm_after import can_do_without, decide, excluded, fresh_verdict
from train.launch.views import RankView

LOST = {"exit_code": 7, "cause": "host node2 (node rank 1, ranks 2-3) was lost: no word", "host": "node2"}
SAVED = {"exit_code": 75, "cause": "stopped by SIGUSR2 at node1 at step 5, saved", "host": None}


@pytest.mark.parametrize(
    ("code", "asked", "verdict", "requeue", "exit_code", "lost"),
    [
        (75, "USR2", SAVED, True, 75, None),
        (137, "USR2", SAVED, True, 75, None),  # srun killed an agent that was on its way out
        (75, "", SAVED, False, 75, None),  # `train stop`
        (75, "USR1", SAVED, False, 75, None),
        (7, "USR1", LOST, False, 7, None),  # asked to stop, whatever comes of it
        (137, "USR1", None, False, 7, None),
        (75, "TERM", SAVED, False, 75, None),  # scancel, preemption
        (0, "", {"exit_code": 0, "cause": None}, False, 0, None),
        (0, "USR2", {"exit_code": 0, "cause": None}, False, 0, None),
        (8, "USR2", {"exit_code": 8, "cause": "nothing saved"}, False, 8, None),
        (7, "", LOST, True, 7, "node2"),
        (137, "", LOST, True, 7, "node2"),
        (7, "TERM", LOST, False, 7, None),
        (137, "", None, True, 7, None),  # the first host's agent was killed
        (137, "TERM", None, False, 7, None),
        (5, "", {"exit_code": 5, "cause": "rank 1 failed"}, False, 5, None),
        (5, "USR2", {"exit_code": 5, "cause": "rank 1 failed"}, False, 5, None),
        (2, "", None, False, 2, None),
        (126, "", None, False, 3, None),  # the container could not start
        (4, "", None, False, 4, None),
        (6, "", None, False, 6, None),
    ],
)
def test_what_goes_back_into_the_queue(
    code: int, asked: str, verdict: dict[str, Any] | None, requeue: bool, exit_code: int, lost: str | None
) -> None:
    made = decide(code, asked, verdict, restarts=3)
    assert (made.requeue, made.exit_code, made.lost) == (requeue, exit_code, lost)
    assert not decide(code, asked, verdict, restarts=4, most=4).requeue


def test_a_stop_in_time_for_the_limit_goes_back_too_whoever_noticed_it() -> None:
    """The words are those of the agents themselves."""
    view = RankView()
    view.code, view.is_ours, view.step = 75, True, 9
    by_ranks = how_it_stopped([view], None, "", "itself, in time for the limit of 60 s").as_dict()
    by_agent = how_it_stopped([view], "the time limit of 60 s", "").as_dict()
    by_user = how_it_stopped([view], "the file STOP at node1", "").as_dict()
    assert decide(75, "", by_ranks, 0).requeue
    assert decide(75, "", by_agent, 0).requeue
    assert not decide(75, "", by_user, 0).requeue


def test_a_node_that_comes_back_ends_the_new_start_in_place_of_the_old_one() -> None:
    stray = {"exit_code": 8, "cause": "stopped by SIGTERM at node2 before it began", "host": None}
    assert decide(8, "", stray, restarts=1).requeue
    assert not decide(8, "", stray, restarts=0).requeue
    assert not decide(8, "USR2", stray, restarts=1).requeue
    assert not decide(8, "TERM", stray, restarts=1).requeue


def test_only_a_verdict_of_this_start_counts(tmp_path: Path) -> None:
    assert fresh_verdict(tmp_path, 0) is None
    file = tmp_path / "verdict.json"
    file.write_text(json.dumps(SAVED))
    os.utime(file, (1000, 1000))
    assert fresh_verdict(tmp_path, 999) == SAVED
    assert fresh_verdict(tmp_path, 1001) is None
    for text in ("", "[]", "{}", '{"exit_code": "x"}'):
        file.write_text(text)
        assert fresh_verdict(tmp_path, 0) is None


def test_a_node_is_excluded_only_where_enough_others_are_up() -> None:
    nodes = "n1 mixed gpu:2\nn2 down* gpu:2\nn3 idle gpu:2(S:0)\nn4 idle (null)\nn5 drained gpu:2\nn6 idle~ gpu:2\n"
    assert can_do_without("n2", 2, True, nodes)
    assert not can_do_without("n1", 2, True, nodes)
    assert can_do_without("n1", 2, False, nodes)
    assert not can_do_without("n1", 3, False, nodes)
    assert not can_do_without("n3,n1", 2, False, nodes)  # one of them by the user's own wish
    assert excluded("   ExcNodeList=(null)\n", "n2") == "n2"
    assert excluded("   ReqNodeList=n1 ExcNodeList=n[3-4]\n", "n4") == "n3,n4"


def test_main_says_what_to_do_in_two_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm-7").mkdir()
    (tmp_path / "slurm-7/verdict.json").write_text(json.dumps(LOST))
    for name, value in {
        "MUSTER_RUNS_DIR": str(tmp_path), "MUSTER_RUN_ID": "slurm-7", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_PARTITION": "main", "SLURM_RESTART_COUNT": "2", "MUSTER_MAX_RESTARTS": "3",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    nodes = "node1 idle (null)\nnode3 idle (null)\n"
    is_own = False
    monkeypatch.setattr(slurm_after, "is_own_disk", lambda folder: is_own)
    monkeypatch.setattr(slurm_after, "_output", lambda *words: nodes if words[0] == "sinfo" else "ExcNodeList=(null)")
    assert slurm_after.main(["7", "", "0"]) == 0
    assert capsys.readouterr().out == "requeue node2 -\n"
    nodes = "node1 idle (null)\n"
    assert slurm_after.main(["7", "", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "requeue - -\n"
    assert "waits for that to return" in said.err
    is_own = True
    assert slurm_after.main(["7", "", "0"]) == 0
    assert capsys.readouterr().out == "requeue - node1\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert slurm_after.main(["7", "", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "end 7\n"
    assert "started again 3 times already (MUSTER_MAX_RESTARTS=3)" in said.err


FIT = {
    "node": "n1", "cpus": 8, "memlock_mb": None, "shm_mb": 64000, "gpus_given": 2, "gpus_seen": 2, "runs": None,
    "free_mb": 9999, "credential": "Success", "ahead_s": 0.1,
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
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
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
