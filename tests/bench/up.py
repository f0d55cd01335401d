"""`make bench-up`: seconds from `docker compose up` to the first training step, the image being there."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tests.ranks import ROOT, clean_environment

TIMES = 3
FIRST_STEP = " step 1/"


def measure(folder: Path) -> dict[str, float]:
    """Seconds until the hosts spoke, until torch was being loaded, and until the first step was done."""
    marks = {"hosts up": "GPUs, /dev/shm", "ranks started": "loading torch", "first step": FIRST_STEP}
    env = clean_environment(MUSTER_ARGS="--train.steps 2 --train.log_every 1 --train.sample_tokens 0")
    seen: dict[str, float] = {}
    started = time.monotonic()
    with subprocess.Popen(
        [folder / "docker" / "up"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as up:  # fmt: skip
        assert up.stdout is not None
        for line in up.stdout:
            for mark, words in marks.items():
                if words in line:
                    seen.setdefault(mark, time.monotonic() - started)
    assert up.returncode == 0, f"docker/up ended with {up.returncode}"
    return seen


def main() -> None:
    """Measure in a clone, so that no run of the user's is met; print each and the median."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "muster-bench"
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        found = []
        for _ in range(TIMES):
            found.append(measure(folder))
            print("  ".join(f"{mark} {seconds:.1f} s" for mark, seconds in found[-1].items()), flush=True)
    median = statistics.median(each["first step"] for each in found)
    print(f"{platform.machine()}, {os.cpu_count()} cores: docker compose up to the first step {median:.1f} s (median)")


if __name__ == "__main__":
    main()
