"""The environment of a rank: the agent's own, extended by what torchrun would set and by Muster's names.

Source: torch 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py. Left out on purpose is
TORCHELASTIC_USE_AGENT_STORE: it makes ranks wait for a store that the launcher keeps, and ours keeps none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from train import seam

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Place:
    """What all ranks of one start have in common on one host."""

    node_rank: int
    nnodes: int
    nproc: int
    """Ranks on this host."""
    first_rank: int
    """Global rank of this host's first."""
    world_size: int
    master_addr: str
    master_port: int
    start_id: str
    restart_count: int
    max_restarts: int
    run_id: str | None
    runs_dir: str
    interface: str | None
    """The network interface towards the other hosts; None on a single host, or where it cannot be told."""
    deadline_s: float | None = None
    """When the time limit ends, on the host's monotonic clock; None: never."""


def rank_environment(base: Mapping[str, str], place: Place, local_rank: int, page: str) -> dict[str, str]:
    """Variables of one rank.

    Args:
        base: the agent's own environment; what the user has set there stays.
        place: where the rank stands.
        local_rank: index on this host.
        page: path of the rank's status page.
    """
    rank = place.first_rank + local_rank
    defaults = {  # only where the user has not said otherwise
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // place.nproc)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if place.interface:
        defaults |= dict.fromkeys(INTERFACE_VARIABLES, place.interface)
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(place.nproc),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(place.nnodes),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.start_id,
        "TORCHELASTIC_ERROR_FILE": str(Path(page).with_suffix(".error.json")),  # where torch's @record writes
        seam.START_ID: place.start_id,
        seam.RUNS_DIR: place.runs_dir,
        seam.STATUS_PAGE: page,
    }
    if place.run_id:
        told[seam.RUN_ID] = place.run_id
    if place.deadline_s is not None:
        told[seam.DEADLINE] = f"{place.deadline_s:.3f}"
    kept = {name: value for name, value in base.items() if name not in _NOT_PASSED_ON}
    return {**defaults, **kept, **told}


_NOT_PASSED_ON = (seam.SECRET_FILE, seam.HEARTBEAT_FILE, "TORCHELASTIC_USE_AGENT_STORE")
