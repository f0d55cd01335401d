"""One rank of the pitfalls: runs halves of lessons, one after the other, and writes down what came of them.

Started by a node agent, as `python -m train.checks.pitfalls.ranks RESULTS PATIENCE_S NAME:HALF …`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from train.checks.pitfalls.team import Team
from train.collective_errors import in_words
from train.config import RuntimeConfig
from train.eager import keep_compiler_out
from train.failure import failure_of
from train.health import Health
from train.identity import identify
from train.options import LaunchOptions
from train.runtime import Runtime
from train.seam import Phase


def main(argv: list[str]) -> None:
    """Run the halves. A rank that fails leaves at once, as one of `python -m train run` does."""
    health = Health.from_environment(os.environ)
    try:
        _run(Path(argv[0]), float(argv[1]), argv[2:], health)
    except BaseException as error:
        health.tell_failure(*failure_of(error))
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure_of(error).exit_code)


def _run(results: Path, patience_s: float, halves: list[str], health: Health) -> None:
    config = RuntimeConfig(device="cpu", backend="gloo", first_step_timeout_s=patience_s, step_timeout_s=patience_s)
    health.start(config)
    me = identify(LaunchOptions(), os.environ)
    keep_compiler_out()
    done = 0
    with in_words(f"rank {me.rank}", lambda: (health.phase, f"in {halves[min(done, len(halves) - 1)]}")):
        runtime = Runtime(me, config, has_agent=health.has_agent)
        _warm_up()
        for done, half in enumerate(halves):
            dist.barrier()  # all begin together: what is slow to start is no hang
            health.enter(Phase.STEP, done + 1)
            _run_half(half, Team(me.rank, me.world_size, lambda at=done: health.beat(at + 1)), results)  # type: ignore[misc]
        health.enter(Phase.ENDING, len(halves))
        runtime.close()


def _warm_up() -> None:
    """Load what a first DDP loads, and connect all pairs: seconds on a busy machine, and no part of any lesson."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _run_half(half: str, team: Team, results: Path) -> None:
    name, _, which = half.partition(":")
    lesson = import_module(f"train.checks.pitfalls.{name}")
    torch.manual_seed(0)
    began_s = time.monotonic()
    _append(results, {"half": half, "rank": team.rank, "began_s": time.time()})
    figure = float(getattr(lesson, which)(team))
    row = {"half": half, "rank": team.rank, "figure": figure, "said": team.said}
    _append(results, {**row, "took_s": round(time.monotonic() - began_s, 3)})


def _append(results: Path, row: dict[str, object]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
