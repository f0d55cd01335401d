"""The validation set is shared out by a DistributedSampler, which pads.

So that all ranks have equally many, it repeats samples from the start. Those count twice, and the metric depends on the
number of ranks. `drop_last` leaves samples out instead, which is no better.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from train.checks.pitfalls.team import Team

LOSSES = torch.arange(1.0, 8.0).square()
"""Each sample's loss: 1, 4, 9 and so on to 49; their mean is 20."""


def wrong(team: Team) -> float:
    """Each rank sums over what the sampler gives it."""
    ids = list(DistributedSampler(range(len(LOSSES)), team.size, team.rank, shuffle=False))  # type: ignore[arg-type, var-annotated]
    totals = torch.tensor([float(LOSSES[ids].sum()), float(len(ids))])
    dist.all_reduce(totals)
    return told(team, totals)


def right(team: Team) -> float:
    """Each rank takes every so-manieth sample; some ranks have one more, and nobody minds."""
    ids = list(range(team.rank, len(LOSSES), team.size))
    totals = torch.tensor([float(LOSSES[ids].sum()), float(len(ids))])
    dist.all_reduce(totals)
    return told(team, totals)


def told(team: Team, totals: torch.Tensor) -> float:
    """The mean loss."""
    total, count = totals.tolist()
    team.say(f"{count:g} losses were counted of {len(LOSSES)} samples; their sum is {total:g}")
    return float(total / count)
