"""A preflight on all hosts of a lab at once, started as a launcher does it, and judged."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tests.hosts import PYTHON, Host, Lab
from tests.ranks import ROOT, clean_environment

Told = dict[str, Any]
PATIENCE_S = 300.0


def looked_at(
    lab: Lab, runs: Sequence[str], *options: str, addresses: Sequence[str] = (), slots: int = 1,
    around: Mapping[int, Sequence[str]] | None = None, env: Mapping[int, Mapping[str, str]] | None = None,
    on: Mapping[int, Host] | None = None,
) -> Told:  # fmt: skip
    """The verdict on all hosts, as JSON. `around`: words before a host's command; `on`: another host in its place."""
    names = [host.name for host in lab.hosts]
    told = [
        {"name": name, "address": address, "slots": slots, "node_rank": rank}
        for rank, (name, address) in enumerate(zip(names, addresses or [h.address for h in lab.hosts], strict=True))
    ]
    plan = json.dumps({"hosts": told, "master_ports": [*range(29500, 29508)], "control_ports": [29601], "run_id": None})
    secret = secrets.token_hex(16)
    workers = []
    for rank, host in enumerate(lab.hosts):
        words = [
            *(around or {}).get(rank, []), PYTHON, "-m", "train", "preflight", "--plan", plan, "--node-rank", str(rank),
            "--runs-dir", runs[rank], "--secret-stdin", "--min-free-mb", "1", *options,
        ]  # fmt: skip
        given = clean_environment(**{"PYTHONPATH": str(ROOT), **(env or {}).get(rank, {})})
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        workers.append((on or {}).get(rank, host).popen(words, env=given, text=True, **pipes))
        stdin = workers[-1].stdin
        assert stdin is not None
        stdin.write(f"{secret}\n")
        stdin.flush()
    said = "".join(worker.communicate(timeout=PATIENCE_S)[0] for worker in workers)
    judge = [PYTHON, "-m", "train", "preflight", "--judge", "-", "--plan", plan, "--json"]
    done = subprocess.run(judge, input=said, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)
    assert done.returncode in (0, 3), said + done.stderr
    verdict: Told = json.loads(done.stdout)
    assert verdict["fit"] == (done.returncode == 0)
    return verdict
