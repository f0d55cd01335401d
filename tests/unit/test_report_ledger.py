"""Where the time went adds up to the wall time, rank by rank, in sums worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.synthetic import of_many, times_row, with_a_restart, write_lines
from train.report import read
from train.report.ledger import CATEGORIES, ledger_of, starts_of
from train.report.read import read_run
from train.report.straggle import heat_of
from train.seam import Activity


def test_every_activity_of_a_rank_has_its_place() -> None:
    assert {activity.words for activity in Activity} < set(CATEGORIES)


def test_a_run_with_a_restart_by_hand(tmp_path: Path) -> None:
    starts = starts_of(read_run(with_a_restart(tmp_path / "run")))
    assert [(s.began, s.ended, s.gap_s, s.first_step, s.last_step) for s in starts] == [
        (102.0, 144.0, 0.0, 0, 40), (146.0, 186.0, 2.0, 20, 60),
    ]  # fmt: skip
    ledger = ledger_of(starts)
    assert ledger.wall_s == 42 + 2 + 40
    assert ledger.lost_steps == 20  # half of the first start's steps, and so half of their time
    nothing = dict.fromkeys(CATEGORIES, 0.0)
    assert ledger.ranks[0] == pytest.approx({
        **nothing, "loading": 9, "joining": 2, "preparing": 3, "first step": 2, "data": 1 + 1, "computing": 10 + 20,
        "waiting": 4 + 10, "optimizer": 0.75 + 1, "other": 0.25, "evaluation": 1, "lost": 16, "gone": 1,
        "restarting": 2,
    })  # fmt: skip
    assert ledger.ranks[1] == pytest.approx({
        **nothing, "loading": 9, "joining": 2, "preparing": 3, "first step": 2, "data": 1 + 1, "computing": 12 + 26,
        "waiting": 1.5 + 1, "optimizer": 0.5 + 1, "other": 0.25, "evaluation": 1, "lost": 15.25, "gone": 2 + 2,
        "restarting": 2, "untold": 0.5 + 1,
    })  # fmt: skip
    for account in ledger.ranks.values():
        assert sum(account.values()) == pytest.approx(84)
    in_steps = (2 + 30 + 14 + 1.75 + 0.25 + 2 + 38 + 2.5 + 1.5 + 0.25) / 2
    assert ledger.goodput == pytest.approx(in_steps / 84)
    assert ledger.excess == 0


def test_without_an_event_the_newest_checkpoint_tells_where_it_went_on(tmp_path: Path) -> None:
    run = read_run(with_a_restart(tmp_path / "run"))
    run.events = [event for event in run.events if event["event"] != "resumed"]
    assert starts_of(run)[1].first_step == 20


def test_a_run_stopped_and_gone_on_with_the_next_day_has_no_wall_time_in_between(tmp_path: Path) -> None:
    run = read_run(with_a_restart(tmp_path / "run"))
    run.events = [event for event in run.events if event["event"] != "restart"]
    ledger = ledger_of(starts_of(run))
    assert ledger.wall_s == 42 + 40
    assert ledger.ranks[0]["restarting"] == 0
    assert sum(ledger.ranks[0].values()) == pytest.approx(82)


def test_a_rank_that_tells_more_than_there_was_is_told_of_and_cut(tmp_path: Path) -> None:
    run = read_run(with_a_restart(tmp_path / "run"))
    run.events[2]["time"] = 106.0  # the start, by a clock that was put forward
    ledger = ledger_of(starts_of(run))
    assert ledger.excess == pytest.approx((41 - (144 - 106 - 1)) / (144 - 106))
    for account in ledger.ranks.values():
        assert sum(account.values()) == pytest.approx(ledger.wall_s)
        assert min(account.values()) >= 0


def test_ranks_without_an_agent_write_rows_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "times").mkdir()
    for rank in range(2):
        rows = [
            times_row(110.0 + rank / 10, "ddd", [(rank, 0, 5, {Activity.LOADING: 4.0, Activity.COMPUTING: 6.0})]),
            times_row(120.0 + rank / 10, "ddd", [(rank, 0, 15, {Activity.LOADING: 4.0, Activity.COMPUTING: 16.0})]),
        ]
        rows[1]["ranks"][0][5] = 0
        write_lines(tmp_path / "times" / f"rank{rank}.jsonl", rows)
    (start,) = starts_of(read_run(tmp_path))
    assert [start.began, start.ended] == pytest.approx([100.0, 120.1])
    assert [sorted(sample.ranks) for sample in start.samples] == [[0, 1], [0, 1]]
    ledger = ledger_of([start])
    assert ledger.ranks[0]["computing"] == 16
    assert ledger.ranks[0]["gone"] == pytest.approx(0.1)
    assert ledger.ranks[1]["untold"] == pytest.approx(0.1)
    assert heat_of([start]).ratios == [[1.0], [1.0]]


def test_the_slow_rank_stands_out_all_the_time(tmp_path: Path) -> None:
    heat = heat_of(starts_of(read_run(of_many(tmp_path / "run", 256, slow=77, samples=64))))
    assert len(heat.ranks) == 256
    assert 50 <= len(heat.slots) <= 61
    for rank, row in enumerate(heat.ratios):
        assert row == pytest.approx([3.0 if rank == 77 else 1.0] * len(row))
    assert not heat.is_blind


def test_restarts_are_seen_in_the_heat_map(tmp_path: Path) -> None:
    heat = heat_of(starts_of(read_run(with_a_restart(tmp_path / "run"))))
    assert heat.restarts == [1]
    first, second = (20 + 2 + 1.5 - 5) / 30, (20 + 1 + 1 - 5) / 30  # rank 0's own seconds a step
    other = (24 + 2 + 1 - 6) / 30, (26 + 1 + 1 - 5) / 30
    assert heat.ratios == [[1.0, 1.0], pytest.approx([other[0] / first, other[1] / second])]


def test_ranks_that_cannot_tell_waiting_are_called_blind(tmp_path: Path) -> None:
    rows = [times_row(t, "e", [(r, 0, t, {Activity.COMPUTING: float(t)}) for r in range(2)]) for t in (110, 120)]
    write_lines(tmp_path / "times.jsonl", rows)
    assert heat_of(starts_of(read_run(tmp_path))).is_blind


def test_of_a_long_file_a_part_is_read_and_of_each_start_the_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_many(tmp_path / "run", 2, slow=1, steps=400, samples=400)
    rows = [json.loads(line) for line in (path / "times.jsonl").read_text().splitlines()]
    for row in rows[:150]:
        row["start_id"] = "bbb"
    write_lines(path / "times.jsonl", rows)
    whole = [sample.time for sample in read_run(path).samples]
    monkeypatch.setattr(read, "MOST_BYTES", (path / "times.jsonl").stat().st_size // 10 + 1)
    part = [sample.time for sample in read_run(path).samples]
    assert 40 <= len(part) <= 44
    assert {whole[149], whole[-1]} <= set(part) <= set(whole)
