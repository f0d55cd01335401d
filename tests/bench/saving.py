"""`python -m tests.bench saving [MB]`: how long a step stands still for a save, and how training fares meanwhile.

Pairs in turn: our background save, torch.save with fsync of the same state, torch.distributed.checkpoint's async_save.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from tests.ranks import free_port
from train.checkpoint import Checkpoints
from train.saver import Saver

PAIRS = 5
WINDOW_S = 0.5
LAYERS = 24


def make_state(megabytes: float) -> dict[str, Any]:
    """Weights and both of Adam's moments, in LAYERS tensors each, of about that size together."""
    numbers = int(megabytes * 1e6 / 4 / 3 / LAYERS)
    model = {f"layer{i}": torch.randn(numbers) for i in range(LAYERS)}
    moments = {i: {"exp_avg": torch.randn(numbers), "exp_avg_sq": torch.rand(numbers)} for i in range(LAYERS)}
    return {"model": model, "optimizer": {"state": moments}}


def blocking_s(state: dict[str, Any], folder: Path) -> float:
    """torch.save, and until it is on the disk."""
    began_s = time.perf_counter()
    with (folder / "blocking.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began_s


def stalls(megabytes: float, folder: Path) -> dict[str, list[float]]:
    """Seconds that each way holds up a step, in turn; the first of each, whose memory is fresh, left out."""
    state = make_state(megabytes)
    saver = Saver(Checkpoints(folder / "ours", keep=1), list(state["model"]))
    found: dict[str, list[float]] = {"ours": [], "torch.save + fsync": [], "dcp.async_save": []}
    for number in range(1, PAIRS + 2):
        began_s = time.perf_counter()
        assert saver.save(number, state)
        found["ours"].append(time.perf_counter() - began_s)
        assert saver.wait()
        found["torch.save + fsync"].append(blocking_s(state, folder))
        target = folder / f"dcp-{number}"
        began_s = time.perf_counter()
        saving = async_save(state, checkpoint_id=target)
        found["dcp.async_save"].append(time.perf_counter() - began_s)
        saving.result()  # type: ignore[union-attr]
        shutil.rmtree(target)
    return {name: seconds[1:] for name, seconds in found.items()}


def throughput(megabytes: float, folder: Path) -> float:
    """Steps a second while a save is being written, as a share of those without: median of pairs of windows."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(64, 512)

    def steps(goes_on: Callable[[float], bool]) -> float:
        count, began_s = 0, time.perf_counter()
        while goes_on(time.perf_counter() - began_s):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        return count / (time.perf_counter() - began_s)

    state = make_state(megabytes)
    saver = Saver(Checkpoints(folder / "beside", keep=1), list(state["model"]))
    saver.save(1, state)
    saver.wait()
    steps(lambda seconds: seconds < WINDOW_S)
    ratios = []
    for number in range(2, PAIRS + 2):
        alone = steps(lambda seconds: seconds < WINDOW_S)
        saver.save(number, state)
        beside = steps(lambda _: saver.is_writing)
        after = steps(lambda seconds: seconds < WINDOW_S)
        ratios.append(beside / statistics.mean((alone, after)))
    return statistics.median(ratios)


def main(argv: list[str]) -> dict[str, Any]:
    """Measure and print."""
    megabytes = float(argv[0]) if argv else 500.0
    print(f"saving {megabytes:g} MB of state: {PAIRS} pairs …", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        found = stalls(megabytes, Path(scratch))
        dist.destroy_process_group()
        share = throughput(megabytes, Path(scratch))
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = statistics.median(
        mine / theirs for mine, theirs in zip(found["ours"], found["torch.save + fsync"], strict=True)
    )
    for name, seconds in medians.items():
        print(f"stall of a save, {name:<20}{seconds * 1000:>9.1f} ms")
    print(f"ours over torch.save + fsync: {ratio:.3f} (target: at most 0.10)")
    print(f"steps a second while a save is written: {share:.2f} of those without (target: at least 0.90)")
    return {"megabytes": megabytes, "stall_s": medians, "ratio": ratio, "throughput": share}
