"""The run folder as agents see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import until
from tests.ranks import ROOT, clean_environment
from train.errors import UsageError
from train.launch.folder import Folder
from train.launch.output import Writer

VERDICT = {"outcome": "finished", "exit_code": 0}


class Desk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = Writer("logs")

    def folder(self, node_rank: int = 0, *, known: bool = True) -> Folder:
        made = Folder(self.writer, node_rank)
        if known:
            made.is_at(self.path)
        return made

    def settle(self) -> None:
        self.writer.close(5)
        self.writer = Writer("logs")

    def rows(self) -> list[dict[str, Any]]:
        self.settle()
        return [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs" / "r")
    yield made
    made.writer.close(5)


def test_events_wait_until_the_folder_is_known(desk: Desk) -> None:
    folder = desk.folder(known=False)
    folder.record("first", number=1)
    folder.record("second", words="ü\udcff\n")
    assert not desk.path.exists()
    folder.is_at(desk.path)
    folder.record("third")
    rows = desk.rows()
    assert [row["event"] for row in rows] == ["first", "second", "third"]
    assert rows[0]["number"] == 1
    assert all(row["t_s"] >= 0 and row["time"] > 1e9 for row in rows)


def test_agent_0_alone_keeps_events(desk: Desk) -> None:
    desk.folder(1).record("seen by another")
    desk.settle()
    assert not (desk.path / "events.jsonl").exists()


def test_a_second_job_is_told_who_has_the_folder(desk: Desk) -> None:
    script = (
        "import sys; from pathlib import Path; from train.launch.folder import Folder; "
        "from train.launch.output import Writer; f = Folder(Writer('x'), 0); f.is_at(Path(sys.argv[1])); "
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(desk.path)], cwd=ROOT, env=clean_environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "held\n"
    desk.folder(1)  # another host of the same job, on a shared file system
    with pytest.raises(UsageError) as refused:
        desk.folder(0)
    (problem,) = refused.value.problems
    assert problem.startswith(f"--run-id: run r is in use by agent {other.pid} on ")
    assert problem.endswith("stop that job, or give another --run-id")
    other.kill()  # however it ends
    other.wait()
    desk.folder(0)
    other.stdin.close()
    other.stdout.close()


def test_the_lock_is_kept_by_this_process_and_names_it(desk: Desk) -> None:
    folder = desk.folder()
    assert folder.path == desk.path
    assert (desk.path / ".agent0.lock").read_text().startswith(f"agent {os.getpid()} on ")


def test_a_folder_that_cannot_be_made_is_refused(desk: Desk) -> None:
    desk.path.parent.mkdir()
    desk.path.write_text("a file")
    with pytest.raises(UsageError, match="--runs-dir: cannot write"):
        desk.folder()


def test_a_stop_file_is_taken_once(desk: Desk) -> None:
    assert not desk.folder(known=False).take_stop_file()
    folder = desk.folder()
    assert not folder.take_stop_file()
    (desk.path / "STOP").touch()
    assert folder.take_stop_file()
    assert not (desk.path / "STOP").exists()
    assert not folder.take_stop_file()


def test_agent_0s_verdict_replaces_and_anothers_yields(desk: Desk) -> None:
    first, second, third = desk.folder(0), desk.folder(1), desk.folder(2)
    file = desk.path / "verdict.json"
    second.conclude({"by": 1, "start_id": "now"}, replace=False)
    until(file.exists, 10)
    third.conclude({"by": 2, "start_id": "now"}, replace=False)
    first.conclude({"by": 0, "start_id": "now"}, replace=True)
    desk.settle()
    assert json.loads(file.read_text()) == {"by": 0, "start_id": "now"}
    desk.folder(3).forget_verdict("now")  # somebody who comes late to the same start leaves it
    assert not list(desk.path.glob("*.tmp")) + list(desk.path.glob(".*.tmp"))


def test_without_a_folder_nothing_is_written(desk: Desk, tmp_path: Path) -> None:
    folder = desk.folder(known=False)
    folder.write("plan.json", {})
    folder.conclude(VERDICT, replace=True)
    folder.discard()
    desk.settle()
    assert list(tmp_path.rglob("*.json")) == []


def test_a_verdict_finds_its_way_past_logs_that_wait(desk: Desk) -> None:
    folder = desk.folder()
    desk.writer._bytes = 8 << 20  # as many as may wait
    folder.record("late")
    folder.conclude(VERDICT, replace=True)
    assert [row["event"] for row in desk.rows()] == ["late"]
    assert json.loads((desk.path / "verdict.json").read_text()) == VERDICT


def test_files_that_cannot_be_written_end_nothing(desk: Desk) -> None:
    folder = desk.folder()
    (desk.path / "evidence").write_text("a file where a folder should be")
    (desk.path / "events.jsonl").mkdir()
    folder.write("evidence/rank0.json", {})
    folder.record("lost")
    folder.write("plan.json", {"still": "written"})
    desk.settle()
    assert json.loads((desk.path / "plan.json").read_text()) == {"still": "written"}


@pytest.mark.parametrize("was_there", [True, False])
def test_where_nothing_was_trained_a_new_folder_goes_again(desk: Desk, was_there: bool) -> None:
    if was_there:
        desk.path.mkdir(parents=True)
    folder = desk.folder()
    folder.record("refused")
    folder.discard()
    desk.settle()
    assert desk.path.exists() == was_there


def test_what_there_is_to_see_now_is_one_small_file_and_goes_with_a_refused_job(desk: Desk) -> None:
    folder = desk.folder(known=False)
    folder.tell_live(ranks=[])  # there is no place for it yet
    folder.add("times.jsonl", ranks=[1])
    folder.is_at(desk.path)
    for number in range(3):
        folder.tell_live(ranks=[number])
    desk.settle()
    live = json.loads((desk.path / "live.json").read_text())
    assert live["ranks"] == [2]
    assert live["time"] > 1e9
    (row,) = [json.loads(line) for line in (desk.path / "times.jsonl").read_text().splitlines()]
    assert row["ranks"] == [1]
    folder._writer = desk.writer
    folder.discard()
    desk.settle()
    assert not desk.path.exists()
