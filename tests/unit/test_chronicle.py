"""What agent 0 writes down while a job runs: all ranks in a row, ever less often, and the last words of each start."""

from __future__ import annotations

import math
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests.supervised import Job
from train.launch.chronicle import Chronicle
from train.launch.facts import every_s, facts_of
from train.launch.folder import Folder
from train.launch.ranks import Rank
from train.seam import Activity, StatusPage


class Desk:
    """In place of the run folder."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.live: list[dict[str, Any]] = []
        self.path = Path()

    def add(self, name: str, **facts: Any) -> None:
        assert name == "times.jsonl"
        self.rows.append(facts)

    def tell_live(self, **facts: Any) -> None:
        self.live.append(facts)


class Written:
    """A job of two hosts with a rank each, and what is written of it."""

    def __init__(self, **terms: Any) -> None:
        self.job, self.desk = Job(**terms), Desk()
        self.chronicle = Chronicle(cast(Folder, self.desk), self.job.supervisor, self.job.now_s)
        self.moments: list[float] = []

    def tell(self, node_rank: int, *facts: list[Any], **more: Any) -> None:
        message = {"kind": "beat", "start_id": self.job.supervisor.start_id, "facts": list(facts), **more}
        self.chronicle.hear(node_rank, message)

    def run(self, seconds: int, step_ms: float = 250.0) -> None:
        for _ in range(seconds):
            self.job.run(1.0)
            for rank in range(2):
                self.tell(rank, [rank, 300, step_ms, [1000, 2000]])
            count = len(self.desk.rows)
            self.chronicle.tick(self.job.now_s)
            self.moments += [self.job.now_s] * (len(self.desk.rows) > max(count, 1))


def test_a_row_has_all_ranks_with_what_the_supervisor_knows_of_them() -> None:
    written = Written()
    written.job.beaten = {1: [[1, True, 41, 2, 20, -1.0]]}
    written.run(1)
    head, row = written.desk.rows
    assert head == {
        "activities": ["loading", "joining", "preparing", "first step", "data", "computing", "waiting", "optimizer",
                       "evaluation", "saving", "other", "ending"],
        "phases": ["starting", "first step", "step", "evaluation", "saving", "ending"],
    }  # fmt: skip
    assert row == {
        "start_id": written.job.supervisor.start_id,
        "restarts": 0,
        "ranks": [
            [0, 0, 0, 0, -1, None, 300, 250.0, [1000, 2000]], [1, 1, 41, 2, 20, None, 300, 250.0, [1000, 2000]],
        ],
    }  # fmt: skip
    (live,) = written.desk.live
    assert live == {**row, "hosts": [["node0", False, 0.2], ["node1", False, 0.2]]}


def test_rows_come_each_second_and_then_ever_less_often_but_live_each_second() -> None:
    written = Written()
    written.run(1500)
    gaps = [round(late - early) for early, late in zip(written.moments, written.moments[1:], strict=False)]
    assert gaps[:100] == [1] * 100
    assert gaps[-1] == 10  # 1500 s and a part in 150 of them
    assert gaps == sorted(gaps)
    assert len(written.desk.live) == 1500


def test_the_last_words_of_each_start_are_kept() -> None:
    written = Written(max_restarts=1)
    supervisor, job = written.job.supervisor, written.job
    first = supervisor.start_id
    written.run(400)
    job.run(0.4)
    end = {"kind": "rank_ended", "facts": [[1, 0, 250.0, [1000, 9999]]]}
    written.chronicle.hear(1, {**end, "start_id": first})
    before = len(written.desk.rows)
    written.chronicle.note("rank ended")
    assert len(written.desk.rows) == before
    written.chronicle.note("restart")
    (row,) = written.desk.rows[before:]
    assert row["start_id"] == first
    assert [rank[-1] for rank in row["ranks"]] == [[1000, 2000], [1000, 9999]]
    job.rank_ends(0, 1)
    job.run(10)
    assert supervisor.start_id != first
    written.chronicle.hear(1, {**end, "start_id": first})  # it was under way when that start was over
    written.chronicle.note("verdict")
    assert len(written.desk.rows) == before + 1


@pytest.mark.parametrize("facts", [[[0, 1, 1.0, []]], [[1, 1, 1.0, [0] * (len(Activity) + 1)]], [[1, "x", 1.0, []]]])
def test_facts_that_are_none_are_refused(facts: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"facts of rank|invalid literal"):
        Written().tell(1, *facts)


def test_large_jobs_tell_less_often() -> None:
    assert [every_s(ranks) for ranks in (1, 1000, 8000)] == [1.0, 1.0, 8.0]


def rank_with(page: StatusPage, **more: Any) -> Rank:
    return cast(Rank, SimpleNamespace(**{"rank": 3, "page": page, "pid": os.getpid(), "is_shell": False, "code": None,
                                         "step_s": 0.01234, **more}))  # fmt: skip


def test_facts_of_a_rank(tmp_path: Path) -> None:
    page = StatusPage.make(tmp_path / "page")
    rank, memory_mb, step_ms, times_ms = facts_of(rank_with(page))
    assert (rank, step_ms, times_ms) == (3, 12.3, [])
    assert memory_mb == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.1)
    page.open_as_rank(5.0, time.monotonic() - 3.0)
    page.doing(Activity.COMPUTING)
    assert facts_of(rank_with(page, code=0))[1] == 0
    loading_ms, *rest = facts_of(rank_with(page))[3]
    assert 3000 <= loading_ms < 4000
    assert sum(rest) < 1000


@pytest.mark.parametrize("written", [(99.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (4.0, math.nan), (4.0, -math.inf)])
def test_whatever_a_rank_writes_on_its_page_the_agent_goes_on(written: tuple[float, float], tmp_path: Path) -> None:
    page = StatusPage.make(tmp_path / "page")
    with (tmp_path / "page").open("r+b") as file:
        file.seek(128)
        file.write(struct.pack("=dd", *written))
    assert all(isinstance(each, int) for each in facts_of(rank_with(page))[3])
