"""BatchNorm on each rank sees that rank's samples alone.

What a sample becomes depends on who shares its rank: the same global batch gives other numbers on two ranks than on
one, and few samples a rank give poor statistics. On GPUs `nn.SyncBatchNorm` does what is done by hand here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from train.checks.pitfalls.team import Team

EPSILON = 1e-5


def wrong(team: Team) -> float:
    """Mean and variance of the rank's own samples."""
    mine = inputs_of(team.rank)
    mean = mine.mean()
    variance = (mine - mean).square().mean()
    return told(team, (mine - mean) / (variance + EPSILON).sqrt())


def right(team: Team) -> float:
    """Mean and variance of all ranks' samples: three sums, added up over the ranks."""
    mine = inputs_of(team.rank)
    sums = torch.stack([mine.sum(), mine.square().sum(), torch.tensor(float(len(mine)))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    variance = sums[1] / sums[2] - mean.square()
    return told(team, (mine - mean) / (variance + EPSILON).sqrt())


def inputs_of(rank: int) -> torch.Tensor:
    """Two samples a rank: 0 and 2, 10 and 12, and so on."""
    return torch.tensor([0.0, 2.0]) + 10 * rank


def told(team: Team, output: torch.Tensor) -> float:
    """Largest difference from what torch's own BatchNorm makes of all samples in one process."""
    everything = torch.cat([inputs_of(rank) for rank in range(team.size)])
    alone = nn.BatchNorm1d(1, eps=EPSILON)(everything.unsqueeze(1)).detach().flatten()
    mine = alone[2 * team.rank : 2 * team.rank + 2]
    team.say(f"rank 0's samples become {shown(output)}; in one process with all others {shown(mine)}")
    return max(team.everyones((output - mine).abs().max()))


def shown(values: torch.Tensor) -> str:
    """Two numbers."""
    return " and ".join(f"{value:.3f}" for value in values.tolist())
