"""Whether all ranks still hold the same parameters: a cheap hash of each tensor's bits, compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from train.errors import ReplicaError
from train.runtime import Runtime
from train.seam import Phase

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number, like all of int64's arithmetic
_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64
_AT_A_TIME = 1 << 22  # of numbers: eight bytes each for a while, so not of a whole embedding at once
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def fingerprints(model: nn.Module) -> torch.Tensor:
    """One int64 a parameter: equal bits give equal numbers, and a changed or moved value almost surely another."""
    sums = []
    for parameter in model.parameters():
        bits = parameter.detach().contiguous().view(-1).view(_BITS[parameter.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _AT_A_TIME):
            part = bits[start : start + _AT_A_TIME].to(torch.int64)
            mixed = part + torch.arange(start + 1, start + 1 + part.numel(), device=bits.device) * _GOLDEN
            # Not linear in bits and place, or changes in two places could cancel out (steps of splitmix64's finalizer).
            mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER
            total += (mixed ^ (mixed >> 27)).sum()
        sums.append(total)
    return torch.stack(sums)


def check_replicas(model: nn.Module, runtime: Runtime, step: int) -> None:
    """Compare the parameters of all ranks. Raises ReplicaError on all of them, naming tensor and ranks."""
    if runtime.world_size == 1:
        return
    mine = fingerprints(model)
    extremes = torch.stack((mine, -mine))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=runtime.group(Phase.STEP))
    differs = extremes[0] != -extremes[1]
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    name, _ = list(model.named_parameters())[first]
    by_hash: dict[int, list[str]] = {}
    for rank, (host, value) in enumerate(runtime.gather((runtime.host, int(mine[first])))):
        by_hash.setdefault(value, []).append(f"{rank} ({host})")
    majority = max(by_hash.values(), key=len)
    odd = "; ".join(", ".join(ranks) for ranks in by_hash.values() if ranks is not majority)
    raise ReplicaError(
        f"replicas differ after step {step}: {int(differs.sum())} of {len(mine)} parameters, the first is {name}; "
        f"rank {odd} differs from rank {', '.join(majority)}. Something changed one rank's weights alone: "
        "an update, a learning rate or a branch under `if rank == 0`, or memory that flips bits"
    )
