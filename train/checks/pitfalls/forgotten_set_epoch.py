"""The sampler is never told the epoch.

DistributedSampler shuffles by seed + epoch. Without `set_epoch` that is the same number each time: every epoch has the
same batches in the same order. Training goes on, and generalises worse than it could.
"""

from __future__ import annotations

from torch.utils.data import DistributedSampler

from train.checks.pitfalls.team import Team

SAMPLES = range(20)
EPOCHS = 3


def wrong(team: Team) -> float:
    """Iterate, epoch after epoch."""
    sampler: DistributedSampler[int] = DistributedSampler(SAMPLES, num_replicas=team.size, rank=team.rank)  # type: ignore[arg-type]
    seen = []
    for _ in range(EPOCHS):
        seen.append(list(sampler))
    return told(team, seen)


def right(team: Team) -> float:
    """Say which epoch it is, before each."""
    sampler: DistributedSampler[int] = DistributedSampler(SAMPLES, num_replicas=team.size, rank=team.rank)  # type: ignore[arg-type]
    seen = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        seen.append(list(sampler))
    return told(team, seen)


def told(team: Team, seen: list[list[int]]) -> float:
    """Number of different orders."""
    for epoch, order in enumerate(seen):
        team.say(f"epoch {epoch}: rank {team.rank} sees samples {', '.join(map(str, order[:6]))} …")
    return float(len({tuple(order) for order in seen}))
