"""What becomes of a job when its agents have ended: only what can go on goes back, and never for ever."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import tools
from train.launch import slurm_after
from train.launch.endings import how_it_stopped, stopped_early
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
    stray = stopped_early("SIGTERM at node2").as_dict()
    assert decide(8, "", stray, restarts=1).requeue
    assert not decide(8, "", stray, restarts=0).requeue
    assert not decide(8, "USR2", stray, restarts=1).requeue
    assert not decide(8, "TERM", stray, restarts=1).requeue
    assert decide(8, "", stopped_early("SIGTERM").as_dict(), restarts=1).requeue
    passed_on = stopped_early("SIGUSR2 at node2").as_dict()  # by the script around an agent
    assert decide(8, "", passed_on, restarts=1).requeue


@pytest.mark.parametrize("by", ["the STOP file at node1", "the STOP file", "its standard input at node1", "SIGINT"])
def test_somebody_who_asks_to_stop_while_it_starts_again_is_heard(by: str) -> None:
    assert not decide(8, "", stopped_early(by).as_dict(), restarts=1).requeue


def test_without_a_verdict_it_goes_back_only_while_the_run_gets_on() -> None:
    assert decide(137, "", None, 1, got_on=True).requeue
    stopped = decide(137, "", None, 1, got_on=False)
    assert (stopped.requeue, stopped.exit_code) == (False, 7)
    assert "srun's code was 137" in stopped.words
    assert "no newer checkpoint since: not started again" in stopped.words
    assert not decide(7, "", None, 1, got_on=False).requeue
    assert decide(7, "", LOST, 1, got_on=False).requeue  # a host is known to be lost, and left out
    assert decide(75, "USR2", SAVED, 1, got_on=False).requeue


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
    nodes = "n1 mixed gpu:2\nn2 down* gpu:2\nn3 idle gpu:2(S:0)\nn4 idle (null)\nn5 drained gpu:2\nn6 idle* gpu:2\n"
    assert can_do_without("n2", 2, True, nodes)
    assert not can_do_without("n1", 2, True, nodes)
    assert can_do_without("n1", 2, False, nodes)
    assert not can_do_without("n1", 3, False, nodes)
    assert not can_do_without("n3,n1", 2, False, nodes)  # one of them by the user's own wish
    assert excluded("   ExcNodeList=(null)\n", "n2") == "n2"
    assert excluded("   ReqNodeList=n1 ExcNodeList=n[3-4]\n", "n4") == "n3,n4"


@pytest.mark.parametrize(
    ("state", "is_up"),
    [
        *((state, True) for state in ("idle", "mixed", "allocated", "allocated+", "completing", "planned", "mixed-")),
        *((state, True) for state in ("idle~", "idle#", "idle!", "idle%", "mixed@", "allocated^", "IDLE")),
        *(
            (state, False)
            for state in ("idle*", "mixed*", "allocated$", "maint", "down", "down~", "drained", "draining@")
        ),
        *(
            (state, False)
            for state in ("fail", "failing", "inval", "unknown", "future", "reboot^", "perfctrs", "reserved")
        ),
        *((state, False) for state in ("powering_down", "powered_down", "blocked", "error", "idlers", "")),
    ],
)
def test_states_of_nodes_that_can_have_a_job(state: str, is_up: bool) -> None:
    """As `node_state_string` of Slurm's source spells them, 22.05 and later."""
    assert can_do_without("n1", 1, False, f"n1 idle (null)\nn2 {state} (null)\n") == is_up


def test_nodes_of_a_reservation_are_for_jobs_in_one() -> None:
    assert can_do_without("n1", 1, False, "n2 reserved (null)", reserved=True)


JOB = {
    "SLURM_JOB_ID": "7", "MUSTER_RUN_ID": "slurm-7", "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_PARTITION": "main", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip


class TestTheMark:
    """How far a run was when it last ended without a verdict, across starts."""

    def again(self, runs: Path, code: int = 137, asked: str = "", **env: str) -> bool:
        return slurm_after.judge(code, asked, 0.0, {**JOB, "MUSTER_RUNS_DIR": str(runs), **env}).requeue

    def save(self, runs: Path, step: int) -> None:
        (runs / f"slurm-7/checkpoints/step-{step:08}").mkdir(parents=True)

    def test_one_end_without_a_verdict_is_forgiven_and_each_after_a_newer_checkpoint(self, tmp_path: Path) -> None:
        assert self.again(tmp_path)
        assert not self.again(tmp_path)
        assert not self.again(tmp_path)
        self.save(tmp_path, 50)
        assert self.again(tmp_path)
        assert not self.again(tmp_path)
        self.save(tmp_path, 100)
        (tmp_path / "slurm-7/checkpoints/.writing-step-00000150").mkdir()
        (tmp_path / "slurm-7/checkpoints/step-x").mkdir()
        assert self.again(tmp_path)
        assert not self.again(tmp_path)

    def test_another_job_that_goes_on_with_the_run_begins_anew(self, tmp_path: Path) -> None:
        assert self.again(tmp_path)
        assert self.again(tmp_path, SLURM_JOB_ID="8")
        assert not self.again(tmp_path, SLURM_JOB_ID="8")
        assert self.again(tmp_path, SLURM_JOB_ID="9", SLURM_ARRAY_JOB_ID="8", SLURM_ARRAY_TASK_ID="1")

    def test_what_ended_in_good_order_between_has_got_on(self, tmp_path: Path) -> None:
        """A script of its own, of whose checkpoints nothing is known."""
        assert self.again(tmp_path)
        (tmp_path / "slurm-7/verdict.json").write_text(json.dumps(SAVED))
        assert self.again(tmp_path, 75, "USR2")
        (tmp_path / "slurm-7/verdict.json").unlink()
        assert self.again(tmp_path)

    def test_where_nothing_can_be_noted_it_does_not_go_round(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "slurm-7").touch()
        assert not self.again(tmp_path)
        assert "slurm-7 cannot be written: not started again" in capsys.readouterr().err
        (tmp_path / "slurm-7").unlink()
        (tmp_path / "slurm-7").mkdir()
        (tmp_path / "slurm-7" / slurm_after.MARK).write_text("{")
        assert not self.again(tmp_path)


class TestWhatAccountingKnows:
    """With a sacct of ours."""

    def test_more_than_a_code_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = "7|RUNNING|node[1-2]\n7.batch|RUNNING|node1\n7.0|OUT_OF_MEMORY|node1\n7.1|CANCELLED by 0|node1\n"
        tools(tmp_path, monkeypatch, sacct=f'[ "$1" = --jobs=7 ] || exit 1\nprintf "{rows}"')
        assert slurm_after.known_to_accounting("7") == "OUT_OF_MEMORY of 7.0 on node1"
        made = slurm_after.judge(137, "", 0.0, {**JOB, "MUSTER_RUNS_DIR": str(tmp_path)})
        assert "(srun's code was 137); Slurm's accounting says OUT_OF_MEMORY of 7.0 on node1: back" in made.words

    def test_news_that_are_late_are_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = tmp_path / "seen"
        script = f"if [ -e {seen} ]; then echo '7.0|NODE_FAIL|node2'; else echo '7.0|RUNNING|node2'; touch {seen}; fi"
        tools(tmp_path, monkeypatch, sacct=script)
        assert slurm_after.known_to_accounting("7") == "NODE_FAIL of 7.0 on node2"

    @pytest.mark.parametrize(
        "script", ["exit 1", "echo Slurm accounting storage is disabled >&2; exit 1", "exec sleep 60", "echo '||'"]
    )
    def test_where_there_is_none_nothing_is(self, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tools(tmp_path, monkeypatch, sacct=script)
        began_s = time.monotonic()
        assert slurm_after.known_to_accounting("7", 1.0) == ""
        assert time.monotonic() - began_s < 20


def test_main_says_what_to_do_in_a_few_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm-7").mkdir()
    (tmp_path / "slurm-7/verdict.json").write_text(json.dumps(LOST))
    for name, value in {**JOB, "MUSTER_RUNS_DIR": str(tmp_path), "MUSTER_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)
    nodes = "node1 idle (null)\nnode3 idle (null)\n"
    is_own = False
    monkeypatch.setattr(slurm_after, "is_own_disk", lambda folder: is_own)
    monkeypatch.setattr(slurm_after, "output", lambda *words: nodes if words[0] == "sinfo" else "ExcNodeList=(null)")
    assert slurm_after.main(["7", "", "0"]) == 0
    assert capsys.readouterr().out == "requeue 7 node2 -\n"
    nodes = "node1 idle (null)\n"
    assert slurm_after.main(["7", "", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "requeue 7 - -\n"
    assert "waits for that to return" in said.err
    is_own = True
    assert slurm_after.main(["7", "", "0"]) == 0
    assert capsys.readouterr().out == "requeue 7 - node1\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert slurm_after.main(["7", "", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "end 7\n"
    assert "started again 3 times already (MUSTER_MAX_RESTARTS=3)" in said.err
