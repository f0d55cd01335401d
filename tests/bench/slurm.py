"""`make bench-slurm`: seconds from `sbatch` to the first training step, beside `srun torchrun` in turn.

On the lab's real Slurm: two nodes, two ranks each, all on the cores of this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics

from tests.lab.slurms import Slurm, site

PAIRS = 5
WORK = (
    "--model.name linear --data.name regression --train.eval_every 0 --train.tensorboard false --train.log_every 1 "
    "--train.steps 3 --runtime.device cpu"
)
TORCHRUN = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=2 --output=%x-%j.out --job-name=torchrun
export PYTHONPATH=/opt/muster PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
echo script
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --ntasks=2 --cpus-per-task=2 --kill-on-bad-exit=1 /opt/muster/venv/bin/torchrun --nnodes=2 --nproc-per-node=2 \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID" \\
    -m train run --config ddp --runs-dir /tmp/runs {WORK}
"""
MARKS = {
    "muster": {"script runs": "muster: job", "agents start": "ranks on", "ranks start": "loading torch"},
    "torchrun": {"script runs": "script", "ranks start": "loading torch"},
}
FIRST_STEP = "step 1/"
CLOCK = 'date +%s.%N; "$@"'
WATCH = """log=$1; shift
for mark do until grep -qs "$mark" "$log"; do sleep 0.05; done; date +%s.%N; done"""


def measure(slurm: Slurm, whose: str) -> dict[str, float]:
    """Seconds from Enter to each mark in the job's log, the last of them the first step."""
    words = ["/opt/muster/slurm/ddp.sbatch", *WORK.split()] if whose == "muster" else ["torchrun.sbatch"]
    began, job = slurm.sh("head", "sh", "-c", CLOCK, "sh", "sbatch", "--parsable", *words).splitlines()
    log = f"/home/muster/{'muster-ddp' if whose == 'muster' else whose}-{job}.out"
    marks = {**MARKS[whose], "first step": FIRST_STEP}
    seen = slurm.sh("node1", "sh", "-c", WATCH, "sh", log, *marks.values()).split()
    assert slurm.end(job) == "COMPLETED", slurm.log(job)
    return {mark: float(at) - float(began) for mark, at in zip(marks, seen, strict=True)}


def main() -> None:
    """Pairs in turn; print each, the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    pairs = parser.parse_args().pairs
    found: dict[str, list[dict[str, float]]] = {"muster": [], "torchrun": []}
    with site() as slurm:
        slurm.sh("head", "sh", "-c", 'printf %s "$1" >torchrun.sbatch', "sh", TORCHRUN)
        for _ in range(pairs):
            for whose, rows in found.items():
                rows.append(measure(slurm, whose))
                print(
                    f"{whose:<9}",
                    "  ".join(f"{mark} {seconds:.1f} s" for mark, seconds in rows[-1].items()),
                    flush=True,
                )
    print(f"{platform.machine()}, {os.cpu_count()} cores: sbatch to the first step of four ranks on two nodes")
    for whose, rows in found.items():
        print(
            f"{whose:<9}", "  ".join(f"{m} {statistics.median(r[m] for r in rows):.1f} s" for m in rows[0]), "(medians)"
        )
    ratios = [o["first step"] / t["first step"] for o, t in zip(found["muster"], found["torchrun"], strict=True)]
    print(f"muster over torchrun: {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
