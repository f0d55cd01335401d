"""The ranks meet in collectives that are not the same.

Collectives are matched by their order alone. Here a branch makes rank 0 send one number more than the others: with luck
that is an error, with less luck a hang, and where sizes happen to fit, a rank takes numbers for others than they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from train.checks.pitfalls.team import Team


def wrong(team: Team) -> float:
    """Rank 0 adds a metric to what is summed up: its own idea."""
    numbers = [1.0, 2.0]
    if team.rank == 0:
        numbers.append(3.0)
    sums = torch.tensor(numbers)
    dist.all_reduce(sums)
    return told(team, sums)


def right(team: Team) -> float:
    """All ranks send as many; whoever has nothing to say says 0."""
    numbers = [1.0, 2.0, 0.0]
    if team.rank == 0:
        numbers[2] = 3.0
    sums = torch.tensor(numbers)
    dist.all_reduce(sums)
    return told(team, sums)


def told(team: Team, sums: torch.Tensor) -> float:
    """The sum of all that was sent."""
    team.say(f"rank {team.rank} came through with the sums {', '.join(f'{number:g}' for number in sums.tolist())}")
    return float(sums.sum())
