"""slurm/common.sh whole, around an `srun` and a `scontrol` of ours: what a job's shell says, asks of Slurm, ends with.

What Slurm itself does with that is in tests/lab/test_slurm.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, tools

SHOW = "JobId=7 JobName=x\n   Command={0}/slurm/ddp.sbatch\n   StdOut=/home/me/x-7.out"
SCONTROL = """echo "$*" >>{calls}
case "$1 $2" in
    "show hostnames") echo "$3" ;;
    "show job") {show} ;;
    "--details show") cat {shown} ;;
    *) {other} ;;
esac"""

LOST = '{"exit_code": 7, "cause": "host node1 was lost", "host": "node1"}'


@dataclass
class Done:
    """How a job's script ended."""

    code: int
    said: str
    asked: list[str]
    """Of scontrol, but for what it shows."""


class Job:
    """A batch script that Slurm has started on one host, as far as it can tell."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.runs = folder / "runs"
        self.calls, self.shown = folder / "calls", folder / "shown"
        self.shown.write_text(SHOW.format(ROOT))
        (folder / "bin").mkdir()
        self.tools(srun="exit 0", sinfo="echo 'node1 idle (null)'", sleep="exit 0")
        self.controller()

    def tools(self, **scripts: str) -> None:
        tools(self.folder / "bin", self.monkeypatch, **scripts)

    def controller(self, show: str = "cat {shown}", other: str = "exit 0") -> None:
        """What scontrol does when it is to show a job, and else."""
        values = {"calls": self.calls, "shown": self.shown}
        self.tools(scontrol=SCONTROL.format(show=show.format(**values), other=other.format(**values), **values))

    def run(self, *words: str, script: str = "ddp", **env: str) -> Done:
        copy = self.folder / "slurm_script"
        copy.write_text((ROOT / f"slurm/{script}.sbatch").read_text())
        self.calls.write_text("")
        environment = {
            **clean_environment(), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_PARTITION": "main", "SLURM_SUBMIT_DIR": str(self.folder), "MUSTER_PYTHON": sys.executable,
            "MUSTER_RUNTIME": "docker", "MUSTER_RUNS_DIR": str(self.runs), "MUSTER_SITE": "/dev/null", **env,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", str(copy), *words], env=environment, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        asked = [line for line in self.calls.read_text().splitlines() if not line.startswith(("show", "--details"))]
        return Done(done.returncode, done.stdout, asked)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_its_code_is_that_of_the_agents_and_its_last_line_says_so(job: Job) -> None:
    done = job.run()
    assert (done.code, done.asked, done.said.splitlines()[-1]) == (0, [], "muster: exit code 0")
    job.tools(srun="exit 5")
    done = job.run()
    assert (done.code, done.asked) == (5, [])
    assert done.said.splitlines()[0].startswith("muster: job 7 (x) on node1, restart 0 · log /home/me/x-7.out · run ")
    assert done.said.splitlines()[-1] == "muster: exit code 5: not started again"


def test_an_agent_that_was_killed_twice_without_a_newer_checkpoint_is_not_started_a_third_time(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    done = job.run()
    assert (done.code, done.asked) == (0, ["requeue 7"])
    done = job.run(SLURM_RESTART_COUNT="1")
    assert (done.code, done.asked) == (7, [])
    assert "no newer checkpoint since: not started again" in done.said.splitlines()[-1]
    (job.runs / "slurm-7/checkpoints/step-00000050").mkdir(parents=True)
    assert job.run(SLURM_RESTART_COUNT="2").asked == ["requeue 7"]


@pytest.mark.parametrize("value", ["lots", "-1", "1.5", "1e3", "1 2", "99999999999999999999"])
def test_a_number_of_restarts_that_is_none_is_told_before_anything_starts(job: Job, value: str) -> None:
    job.tools(srun="echo started")
    done = job.run(MUSTER_MAX_RESTARTS=value)
    assert done.code == 2
    assert done.said.splitlines()[0].startswith("muster: job 7 ")
    assert done.said.splitlines()[1:] == [
        f"muster: MUSTER_MAX_RESTARTS='{value}' must be a whole number: nothing was started"
    ]


def test_no_restart_at_all_can_be_asked_for(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    done = job.run(MUSTER_MAX_RESTARTS="0")
    assert (done.code, done.asked) == (7, [])
    assert "(MUSTER_MAX_RESTARTS=0)" in done.said


def test_where_slurm_does_not_take_it_back_it_says_so_and_how_to_go_on(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    job.controller(other="echo 'slurm_requeue error: Requested operation is presently disabled' >&2; exit 1")
    done = job.run()
    assert (done.code, done.asked) == (7, ["requeue 7"] * 3)
    assert "Slurm did not take it back into the queue (scontrol requeue 7): exit code 7." in done.said
    assert done.said.splitlines()[-1].endswith("submit it again with MUSTER_RUN_ID=slurm-7")


def test_slurm_ends_the_script_as_soon_as_it_has_taken_it_back_and_all_is_told_yet(job: Job) -> None:
    """To all that the script has started, scontrol itself included."""
    job.tools(srun="mkdir -p runs/slurm-7; cp lost runs/slurm-7/verdict.json; exit 7", sinfo="echo 'node2 idle (null)'")
    (job.folder / "lost").write_text(LOST)
    job.controller(other="kill -TERM $$ $PPID; exit 0")
    done = job.run()
    assert (done.code, done.asked) == (0, ["requeue 7", "update JobId=7 ExcNodeList=node1"])
    assert "did not take" not in done.said


def test_where_only_the_answer_is_lost_it_is_not_asked_twice(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    job.controller(other="echo '   JobState=PENDING' >>{shown}; exit 1")
    done = job.run()
    assert (done.code, done.asked) == (0, ["requeue 7"])
    assert "did not take" not in done.said


def test_a_controller_that_is_away_for_a_moment_is_asked_again(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    job.controller(other="[ $(grep -c requeue {calls}) = 2 ]")
    done = job.run()
    assert (done.code, done.asked) == (0, ["requeue 7"] * 2)
    assert "did not take" not in done.said


def test_an_element_of_an_array_is_named_by_both_its_numbers(job: Job) -> None:
    job.tools(srun="kill -9 $$")
    done = job.run(SLURM_JOB_ID="9", SLURM_ARRAY_JOB_ID="8", SLURM_ARRAY_TASK_ID="1")
    assert (done.code, done.asked) == (0, ["requeue 8_1"])


def test_nodes_that_cannot_be_left_out_are_told(job: Job) -> None:
    job.tools(srun="mkdir -p runs/slurm-7; cp lost runs/slurm-7/verdict.json; exit 7", sinfo="echo 'node2 idle (null)'")
    (job.folder / "lost").write_text(LOST)
    assert job.run().asked == ["requeue 7", "update JobId=7 ExcNodeList=node1"]
    job.controller(other="[ $1 = requeue ]")
    done = job.run()
    assert (done.code, done.asked) == (0, ["requeue 7", *["update JobId=7 ExcNodeList=node1"] * 3])
    assert done.said.splitlines()[-1] == "muster: Slurm did not take that in: it may start on that host again"


def test_a_controller_that_is_silent_at_first_is_waited_for(job: Job) -> None:
    job.controller(show="[ $(grep -c '^show job' {calls}) -lt 3 ] || cat {shown}")
    done = job.run(MUSTER_HOME=str(ROOT))
    assert done.code == 0
    assert "log /home/me/x-7.out" in done.said


@pytest.mark.parametrize("show", ["exit 1", "exit 0"])
def test_a_controller_that_stays_silent_is_named(job: Job, show: str) -> None:
    job.tools(srun="echo started")
    job.controller(show=show)
    done = job.run(MUSTER_HOME=str(ROOT))
    assert done.code == 3
    assert "scontrol show job 7 told " in done.said
    assert "is slurmctld up? Nothing was started" in done.said
    assert "\nstarted" not in done.said
    assert "unbound" not in done.said
    assert "null or not set" not in done.said


def test_a_grace_that_the_signal_does_not_leave_is_told_with_the_numbers(job: Job) -> None:
    job.shown.write_text(job.shown.read_text() + "\n   TimeLimit=01:00:00\n   EndTime=2099-01-01T00:00:00\n")
    words = (
        "MUSTER_GRACE_S=300, but the script is signalled 150 s before the time limit: give sbatch --signal=B:USR2@330"
    )
    said = job.run(MUSTER_GRACE_S="300").said
    assert words in said
    assert "MUSTER_GRACE_S=120" in said
    for grace in ("120", "10", ""):
        assert "is signalled" not in job.run(MUSTER_GRACE_S=grace).said
    assert "is signalled" not in job.run(MUSTER_GRACE_S="300", SBATCH_SIGNAL="B:USR2@330").said
    assert "signalled 60 s before" in job.run(MUSTER_GRACE_S="40", SBATCH_SIGNAL="B:USR2@60").said


def test_a_run_folder_is_the_same_from_every_folder(job: Job) -> None:
    job.tools(srun='echo "$@"')
    done = job.run(MUSTER_RUNS_DIR="my runs")
    assert f"run folder {job.folder}/my runs/slurm-7 " in done.said.splitlines()[0]
    assert f"--volume {job.folder}/my runs:{job.folder}/my runs " in done.said


def test_without_a_judgement_the_code_of_the_agents_stands(job: Job) -> None:
    python = f'case "$*" in *slurm_after*) exit 1 ;; esac; exec {sys.executable} "$@"'
    job.tools(srun="exit 6", python=python)
    done = job.run(MUSTER_PYTHON="python")
    assert (done.code, done.said.splitlines()[-1]) == (6, "muster: exit code 6: not started again")
