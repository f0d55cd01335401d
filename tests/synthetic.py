"""Run folders made by hand, as an agent would have left them: what a report is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.seam import Activity, Phase

Rows = Sequence[Mapping[str, Any]]


def write_lines(path: Path, rows: Rows) -> None:
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def times_row(time: float, start_id: str, ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A row of `times.jsonl`. Of each rank: number, host, step, and seconds by activity."""
    told = [
        [rank, node, step, int(Phase.STEP), -1, None, 300, 20.0, [1000 * spent.get(each, 0) for each in Activity]]
        for rank, node, step, spent in ranks
    ]
    return {"time": time, "t_s": time - 100, "start_id": start_id, "restarts": 0, "ranks": told}


def with_a_restart(folder: Path) -> Path:
    """Two hosts with a rank each: 42 s, in which 40 steps were made and 20 saved; 2 s; and 40 s to step 60."""
    folder.mkdir(parents=True)
    a = Activity
    up = {a.LOADING: 5.0, a.JOINING: 1.0, a.PREPARING: 2.0, a.FIRST_STEP: 1.0}
    first = [
        {
            **up,
            a.DATA: 2.0,
            a.COMPUTING: 20.0,
            a.WAITING: 8.0,
            a.OPTIMIZER: 1.5,
            a.OTHER: 0.5,
        },  # 41 s of 42, gone for 1
        {**up, a.DATA: 2.0, a.COMPUTING: 24.0, a.WAITING: 3.0, a.OPTIMIZER: 1.0, a.OTHER: 0.5},  # 39.5, gone for 2
    ]
    again = {a.LOADING: 4.0, a.JOINING: 1.0, a.PREPARING: 1.0, a.FIRST_STEP: 1.0}
    second = [
        {**again, a.DATA: 1.0, a.COMPUTING: 20.0, a.WAITING: 10.0, a.OPTIMIZER: 1.0, a.EVALUATION: 1.0},  # 40 of 40
        {
            **again,
            a.DATA: 1.0,
            a.COMPUTING: 26.0,
            a.WAITING: 1.0,
            a.OPTIMIZER: 1.0,
            a.EVALUATION: 1.0,
        },  # 37, gone for 2
    ]
    early = [{**up, a.COMPUTING: 5.0}, {**up, a.COMPUTING: 6.0}]
    write_lines(
        folder / "times.jsonl",
        [
            {"time": 103.0, "activities": [], "phases": []},
            times_row(116.0, "aaa", [(0, 0, 10, early[0]), (1, 1, 10, early[1])]),
            times_row(144.0, "aaa", [(0, 0, 40, first[0]), (1, 1, 40, first[1])]),
            times_row(158.0, "bbb", [(0, 0, 30, {**again, a.COMPUTING: 5.0}), (1, 1, 30, {**again, a.COMPUTING: 5.0})]),
            times_row(186.0, "bbb", [(0, 0, 60, second[0]), (1, 1, 60, second[1])]),
        ],
    )
    write_lines(
        folder / "events.jsonl",
        [
            {"time": 100.0, "event": "joined", "node_rank": 0, "host": "alpha"},
            {"time": 101.0, "event": "joined", "node_rank": 1, "host": "beta"},
            {"time": 102.0, "event": "start", "start_id": "aaa", "restarts": 0},
            {"time": 130.0, "event": "saved", "step": 20},
            {"time": 142.0, "event": "rank ended", "rank": 1, "host": "beta", "code": -9},
            {"time": 143.0, "event": "rank ended", "rank": 0, "host": "alpha", "code": 5},
            {"time": 144.0, "event": "restart", "number": 1, "after": "rank 1 (beta) was killed by signal 9"},
            {"time": 146.0, "event": "start", "start_id": "bbb", "restarts": 1},
            {"time": 150.0, "event": "resumed", "step": 20},
            {"time": 184.0, "event": "rank ended", "rank": 1, "host": "beta", "code": 0},
            {"time": 186.0, "event": "rank ended", "rank": 0, "host": "alpha", "code": 0},
            {"time": 186.0, "event": "verdict", "outcome": "finished"},
        ],
    )
    rows = [{"step": s, "time_s": s, "loss": 4 - s / 20, "lr": 0.1, "items_per_s": 80.0} for s in range(1, 61)]
    write_lines(folder / "metrics.jsonl", [*rows, {"step": 60, "time_s": 61, "eval_loss": 0.75}])
    hosts = [{"name": f"node{i}", "address": f"10.0.0.{i + 1}", "ranks": [i]} for i in range(2)]
    (folder / "plan.json").write_text(json.dumps({"world_size": 2, "hosts": hosts, "command": ["python", "x.py"]}))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "world_size": 2}))
    (folder / "config.yaml").write_text("train:\n  steps: 60\n")
    verdict = {"outcome": "finished", "exit_code": 0, "cause": None, "step": 60, "evidence": [], "advice": None}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return folder


def of_many(folder: Path, ranks: int, *, slow: int | None = None, steps: int = 500, samples: int = 100) -> Path:
    """A run that goes on, 8 ranks a host, 10 steps a second: `slow` computes three times as long as the others."""
    folder.mkdir(parents=True)
    hosts = -(-ranks // 8)
    rows = []
    for number in range(1, samples + 1):
        step = steps * number // samples
        told = []
        for rank in range(ranks):
            own = 0.06 if rank == slow else 0.02
            spent = {Activity.LOADING: 4.0 + rank % 7, Activity.FIRST_STEP: 1.0, Activity.COMPUTING: step * own}
            told.append((rank, rank // 8, step, {**spent, Activity.WAITING: step * (0.07 - own)}))
        rows.append(times_row(112.0 + 0.1 * step, "ccc", told))
    write_lines(folder / "times.jsonl", rows)
    joined = [{"time": 100.0 + i / 100, "event": "joined", "node_rank": i, "host": f"host{i:02}"} for i in range(hosts)]
    write_lines(folder / "events.jsonl", [*joined, {"time": 101.0, "event": "start", "start_id": "ccc", "restarts": 0}])
    curve = [
        {"step": s, "time_s": s / 10, "loss": 10 / s**0.5, "lr": 1e-3 / s, "grad_norm": 1.0, "items_per_s": 5e3 + s}
        for s in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", curve)
    plan = [
        {"name": f"node{i}", "address": f"10.0.0.{i + 1}", "ranks": [*range(8 * i, min(ranks, 8 * i + 8))]}
        for i in range(hosts)
    ]
    (folder / "plan.json").write_text(json.dumps({"world_size": ranks, "hosts": plan}))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "world_size": ranks}))
    return folder
