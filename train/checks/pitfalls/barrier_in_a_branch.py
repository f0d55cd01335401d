"""A barrier that only some ranks come to.

Put into the branch that writes the checkpoint, it waits for ranks that never take that branch. They are in their next
collective already, where they wait for rank 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from train.checks.pitfalls.team import Team


def wrong(team: Team) -> float:
    """`if rank == 0:` save, then wait for the others: inside."""
    saved = torch.zeros(())
    if team.rank == 0:
        saved += 1  # the checkpoint
        dist.barrier()
    dist.all_reduce(saved)
    return told(team, saved)


def right(team: Team) -> float:
    """The barrier stands behind the branch, where all ranks come by."""
    saved = torch.zeros(())
    if team.rank == 0:
        saved += 1  # the checkpoint
    dist.barrier()
    dist.all_reduce(saved)
    return told(team, saved)


def told(team: Team, saved: torch.Tensor) -> float:
    """How many have saved."""
    team.say(f"all ranks came through; checkpoints written: {saved:g}")
    return float(saved)
