"""`make bench`: the agent beside torchrun; steps a second of the loop over a loop written by hand; a save's stall.

`python -m tests.bench NAME`: one of `loop`, `agent`, `saving`, and (not in `make bench`) `agents`, many of
them, and `links`, a shaped link, alone.

The hand-written loop is the strongest there is: the same model, fused AdamW, batches by one indexing, clipping, and no
logging, checks, schedule or reseeding.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path

import torch

from tests.bench import agent, agents, links, saving
from tests.jobs import config_of, make_job
from train import loop
from train.health import Health
from train.seam import StatusPage
from train.state import Job

WORKS = {
    "tiny MLP": (["model.name=mlp", "data.name=classification", "batch.global_size=32"], 1500),
    "GPT tiny": (["data.val_fraction=0.0001"], 40),
}
PAIRS = 7


def _job(flags: list[str], steps: int) -> Job:
    job = make_job(config_of(*flags, f"train.steps={steps}", "train.log_every=10", "train.sample_tokens=0"))
    job.data.val.gather(torch.tensor([0]))
    return job


def _ours(flags: list[str], steps: int) -> float:
    """Seconds a step of the whole loop, its last evaluation and check left out."""
    job = _job(flags, steps)
    loop.fit(job)
    return job.progress.seconds / steps


def _by_hand(flags: list[str], steps: int) -> float:
    """Seconds a step of plain torch."""
    job = _job(flags, steps)
    model = job.objective
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    started = time.perf_counter()
    for step in range(steps):
        batch = job.data.train.gather(job.order.batch(step))
        loss_sum, count = model(*batch)
        (loss_sum / count).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / steps


def _beat_us(folder: Path) -> float:
    """Microseconds a beat on a status page in a file: what an agent costs a step."""
    page = StatusPage.make(folder / "rank0.page")
    beat = Health(page.path).beat
    return min(timeit.repeat(lambda: beat(1), number=100_000, repeat=7)) / 100_000 * 1e6


def _loop() -> dict[str, dict[str, float]]:
    """The loop and a beat: print a table."""
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    for name, (flags, steps) in WORKS.items():
        print(f"{name}: {PAIRS} pairs of {steps} steps …", file=sys.stderr)
        _ours(flags, steps // 4), _by_hand(flags, steps // 4)
        pairs = [(_ours(flags, steps), _by_hand(flags, steps)) for _ in range(PAIRS)]
        rows[name] = {
            "ours_us": statistics.median(ours for ours, _ in pairs) * 1e6,
            "by_hand_us": statistics.median(hand for _, hand in pairs) * 1e6,
            "speed_over_by_hand": statistics.median(hand / ours for ours, hand in pairs),
        }
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one process, one thread")
    print(f"{'work':<12}{'µs a step':>12}{'by hand':>12}{'speed ratio':>14}")
    for name, row in rows.items():
        print(f"{name:<12}{row['ours_us']:>12.1f}{row['by_hand_us']:>12.1f}{row['speed_over_by_hand']:>14.3f}")
    with tempfile.TemporaryDirectory() as folder:
        rows["beat on a status page"] = {"us": _beat_us(Path(folder))}
    print(f"a beat on a status page: {rows['beat on a status page']['us']:.2f} µs")
    return rows


def main(argv: list[str]) -> None:
    """Measure, print tables, write `bench.json` where BENCH_JSON names a file."""
    benches = {
        "agent": agent.main, "loop": lambda _: _loop(), "agents": agents.main, "links": links.main,
        "saving": saving.main,
    }  # fmt: skip
    names = argv[:1] or ["agent", "loop", "saving"]
    rows = {name: benches[name](argv[1:]) for name in names}
    if "BENCH_JSON" in os.environ:
        Path(os.environ["BENCH_JSON"]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
