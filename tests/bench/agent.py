"""`python -m tests.bench agent`: two ranks that meet over Gloo, wait for each other and end: our agent and torchrun."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.ranks import ROOT, clean_environment

PAIRS = 9
TARGET = 0.55
SCRIPT = """import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


class Cost(NamedTuple):
    """Of one start."""

    wall_s: float
    cpu_s: float
    """Of all its processes."""
    memory_mb: float
    """Most that its launcher held (resident): what it takes from the ranks."""
    all_mb: float
    """Most that all its processes held together, shared pages counted once (proportional set size)."""


class Watch(threading.Thread):
    """Looks at a process tree ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.launcher_mb = self.all_mb = 0.0
        self.is_over = False

    def run(self) -> None:
        """Until told, or until it is gone."""
        while not self.is_over:
            try:
                self.launcher_mb = max(self.launcher_mb, self.root.memory_info().rss / 1e6)
                shares = [self._share_mb(process) for process in (self.root, *self.root.children(recursive=True))]
            except psutil.Error:
                return
            self.all_mb = max(self.all_mb, sum(shares))
            time.sleep(0.1)

    def _share_mb(self, process: psutil.Process) -> float:
        try:
            return float(process.memory_full_info().pss) / 1e6
        except psutil.Error:
            return 0.0


def cost_of(command: list[str], folder: Path, *, watched: bool) -> Cost:
    """Run it once. Memory is looked at in starts of their own, for looking costs time."""
    env = clean_environment(PYTHONPYCACHEPREFIX=str(folder / "compiled"))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = Watch(process.pid)
    if watched:
        watch.start()
    output, _ = process.communicate(timeout=120)
    wall_s = time.perf_counter() - began_s
    watch.is_over = True
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output.decode(errors='replace')}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall_s, cpu_s, watch.launcher_mb, watch.all_mb)


def main(argv: list[str]) -> dict[str, Any]:
    """Pairs in turn; medians, and the median of each pair's ratio."""
    pairs = int(argv[0]) if argv else PAIRS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "meet.py"
        script.write_text(SCRIPT)
        ours = [sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", "2",
                "--runs-dir", str(folder / "runs"), "--", str(script)]  # fmt: skip
        theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        print(f"two ranks that meet and end: {pairs} pairs …", file=sys.stderr)
        memory = [cost_of(command, folder, watched=True) for command in (ours, theirs)]  # also what is loaded first
        costs = [(cost_of(ours, folder, watched=False), cost_of(theirs, folder, watched=False)) for _ in range(pairs)]
    row: dict[str, Any] = {
        "pairs": pairs,
        "wall_s": [statistics.median(pair[i].wall_s for pair in costs) for i in (0, 1)],
        "cpu_s": [statistics.median(pair[i].cpu_s for pair in costs) for i in (0, 1)],
        "launcher_mb": [each.memory_mb for each in memory],
        "all_mb": [each.all_mb for each in memory],
        "wall_over_torchrun": statistics.median(pair[0].wall_s / pair[1].wall_s for pair in costs),
        "cpu_over_torchrun": statistics.median(pair[0].cpu_s / pair[1].cpu_s for pair in costs),
    }
    print(f"{'two ranks: init, barrier, exit':<32}{'agent':>10}{'torchrun':>10}{'ratio':>8}")
    for name, words in (("wall_s", "wall time, s"), ("cpu_s", "CPU time of all, s"),
                        ("launcher_mb", "launcher's peak, MB"), ("all_mb", "peak of all together, MB")):  # fmt: skip
        ours_, theirs_ = row[name]
        ratio = row.get(name.replace("_s", "_over_torchrun")) if name.endswith("_s") else ours_ / theirs_
        print(f"{words:<32}{ours_:>10.2f}{theirs_:>10.2f}{ratio:>8.2f}")
    print(f"target for wall time: at most {TARGET} of torchrun's; machine load {os.getloadavg()[0]:.1f}")
    return row


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
