"""Slurm on a lab of bare hosts, provisioned as a user would, its jobs submitted by the user muster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.container.conftest import IMAGE
from tests.lab.cluster import Cluster
from tests.lab.launches import built_image

NODES = ["node1", "node2", "node3"]
SETTINGS = {
    "SlurmdParameters": "config_overrides", "AuthInfo": "cred_expire=5", "SlurmdTimeout": 10,
    "SchedulerParameters": "bf_interval=2,sched_interval=2", "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE", "PartitionName": "urgent Nodes=ALL PriorityTier=10 State=UP",
}  # fmt: skip
"""Twice the cores that there are; a requeue in seconds, not minutes; a partition that preempts."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Slurm:
    """A lab whose Slurm runs jobs of the user muster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def sh(self, host: str, *argv: str, cwd: str = "/home/muster", **env: str) -> str:
        """As the user who submits."""
        variables = [word for k, v in env.items() for word in ("--env", f"{k}={v}")]
        done = subprocess.run(
            ["docker", "exec", "--user", "muster", "--workdir", cwd, *variables, self.cluster.container(host), *argv],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{host}: {argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(
        self, script: str, *args: str, options: list[str] | None = None, cwd: str = "/home/muster", **env: str
    ) -> str:
        """Its number."""
        path = script if "/" in script else f"/opt/muster/slurm/{script}.sbatch"
        return self.sh("head", "sbatch", "--parsable", *(options or []), path, *args, cwd=cwd, **env)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm says of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.on("head", "scontrol", "show", "job", job)))

    def accounted(self, job: str) -> str:
        """Its state, by Slurm's accounting."""
        return self.sh("head", "sacct", f"--jobs={job}", "--allocations", "--noheader", "--parsable2", "--format=State")

    def log(self, job: str) -> str:
        """Its log, from wherever its first host has put it."""
        name = f"*-{job}.out"
        parts = [
            self.cluster.on(
                node, "sh", "-c", f"cat /home/muster/{name} '/srv/a b'/{name} 2>/dev/null; true", check=False
            )
            for node in NODES
        ]
        return "".join(part for part in parts if "No such container" not in part and "is not running" not in part)

    def until(self, job: str, condition: Callable[[], Any], timeout_s: float = 180) -> None:
        """Wait for it."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {self.facts(job)}\n{self.log(job)}"
            time.sleep(0.3)

    def said(self, job: str, words: str, timeout_s: float = 180, times: int = 1) -> None:
        """Until its log has that."""
        self.until(job, lambda: len(re.findall(words, self.log(job))) >= times, timeout_s)

    def end(self, job: str, timeout_s: float = 240, restarts: str = "") -> str:
        """Its last state; or that it was "RESTARTED", where it was started more often than `restarts`."""
        seen: list[tuple[float, str]] = []

        def is_last() -> bool:
            facts = self.facts(job)
            state = "RESTARTED" if restarts not in ("", facts["Restarts"]) else facts["JobState"]
            if not seen or seen[0][1] != state:
                seen[:] = [(time.monotonic(), state)]
            # While it goes back into the queue it looks for a moment as if it had ended.
            return state == "RESTARTED" or (state in ENDED and time.monotonic() - seen[0][0] > 2)

        self.until(job, is_last, timeout_s)
        return seen[0][1]

    def weights(self, job: str, node: str = "node1") -> str:
        """Hash of its last weights."""
        return self.weights_in(f"/var/lib/muster/runs/slurm-{job}", node)

    def weights_in(self, folder: str, node: str = "node1") -> str:
        """Hash of the last weights in a run folder."""
        return self.sh(node, "sh", "-c", DIGEST.format(folder))

    def left(self) -> str:
        """Processes of jobs, jobs, and nodes that are not idle."""
        ps = "ps -u muster -o pid=,args= | grep -v 'ps -u muster' | grep -v 'grep -v'; true"
        found = [f"{node}: {text}" for node in NODES if (text := self.cluster.on(node, "sh", "-c", ps))]
        found.append(self.cluster.on("head", "squeue", "--noheader"))
        states = self.cluster.on("head", "sinfo", "-hN", "-p", "main", "-o", "%N %T %E").splitlines()
        return "\n".join([*filter(None, found), *(row for row in states if row.split()[1] != "idle")])


DIGEST = """cd /opt/muster && venv/bin/python -c "
import hashlib, sys, torch
from pathlib import Path
folder = Path(sys.argv[1], 'checkpoints')
state = torch.load(sorted(folder.glob('step-*'))[-1] / 'state.pt', weights_only=True)['model']
print(hashlib.sha256(b''.join(k.encode() + v.numpy().tobytes() for k, v in sorted(state.items()))).hexdigest())
" {}"""


@contextmanager
def site() -> Iterator[Slurm]:
    """A lab of its own, with an environment and an image on each node; or, for whoever writes tests, one that stays.

    MUSTER_TEST_SLURM=NAME:FOLDER names the latter, with its inventory in FOLDER/hosts.yml.
    """
    given = os.environ.get("MUSTER_TEST_SLURM")
    if given:
        name, _, folder = given.partition(":")
        cluster = Cluster(name, Path(folder))
        cluster.playbook("provision.yml", "--tags", "code")
        yield Slurm(cluster)
        return
    built_image(wheels=True)
    cluster = Cluster.up()
    try:
        started = time.monotonic()
        settings = {
            "slurm_settings": SETTINGS, "slurm_node_settings": {"CPUs": 8, "CoresPerSocket": 8}, "venv_wanted": True,
            "muster_image": IMAGE, "docker_users": ["muster"], "slurm_accounting": True,
        }  # fmt: skip
        cluster.playbook("provision.yml", "-e", json.dumps(settings), timeout_s=900)
        print(f"a lab with Slurm in {cluster.seconds:.0f} s, provisioned in {time.monotonic() - started:.0f} s")
        for host in ["head", *NODES]:
            cluster.on(host, "mkdir", "--mode=777", "/srv/a b")
        yield Slurm(cluster)
    finally:
        cluster.down()


def fetch(slurm: Slurm, run: str, target: Path) -> Path:
    """A run folder as one: rank 0's host's, with what other hosts' ranks have logged of their samples."""
    target.mkdir()
    for node in reversed(NODES):  # node1's comes last: it counts
        source = f"{slurm.cluster.container(node)}:{run}/."
        subprocess.run(["docker", "cp", source, str(target)], capture_output=True, check=False)
    return target
