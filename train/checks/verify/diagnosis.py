"""Why a strategy's gradients are wrong: what of each rank's own gradient is in them, worked out by least squares.

The right gradient is the sum of what the ranks' samples add to it. Up to the first wrong step all weights were right.
So a wrong gradient can be written as such a sum with other factors, and the factors tell what was done.
"""

from __future__ import annotations

import torch

from train.checks.verify.reference import Reference

_FITS = 1e-7


def explain(reference: Reference, initial: torch.Tensor, gradients: torch.Tensor, limit: float, usual_size: int) -> str:
    """The mistake, in words.

    Args:
        reference: what is right.
        initial: weights before the first step, a row a rank.
        gradients: [ranks, steps, parameters].
        limit: largest |Δ| that is no mistake.
        usual_size: samples of a whole global batch.
    """
    off = (initial - reference.initial).abs().amax(1)
    if bool((off > limit).any()):
        rank = int(off.argmax())
        return (
            f"rank {rank} begins with other weights than rank 0 (|Δ| up to {float(off[rank]):.2g}): "
            "`wrap` does not give rank 0's to all"
        )
    wrong = (gradients - reference.gradients).abs().nan_to_num(nan=float("inf")) > limit
    steps = wrong.any(dim=2).any(dim=0)
    if not bool(steps.any()):
        return "the gradients are right, so what is done with them is not"
    step = int(steps.nonzero()[0])
    where = f"from step {step + 1} on" if bool(steps[step:].all()) else f"first in step {step + 1}"
    of_parameters = wrong[:, step].any(dim=0)
    names = list(dict.fromkeys(name for name, bad in zip(reference.names, of_parameters.tolist(), strict=True) if bad))
    if len(names) < len(set(reference.names)):
        return (
            f"{where} only {', '.join(names)} has a wrong gradient: {_alone(reference, gradients, step, of_parameters)}"
        )
    return f"{where}: {_mixture(reference, gradients[:, step], step, usual_size)}"


def _alone(reference: Reference, gradients: torch.Tensor, step: int, which: torch.Tensor) -> str:
    """What became of some parameters alone."""
    theirs = gradients[:, step][:, which]
    if bool(theirs.isnan().any()):
        return "it has none at all on some rank"
    if bool((theirs - theirs[0]).abs().max() > 0):
        return "it is left out of the all-reduce, each rank has another"
    return "it is wrong in the same way on all ranks"


def _mixture(reference: Reference, gradients: torch.Tensor, step: int, usual_size: int) -> str:
    """By which factors the ranks' own gradients went into what each rank holds."""
    factors = _factors(reference, gradients, step)
    if factors is None:
        return "the gradients are no sum of the ranks' own ones, whatever the factors"
    ranks, size = len(gradients), reference.sizes[step]
    has_share = reference.parts[step].abs().sum(1) > 0
    shown = factors[:, has_share]
    foreign = factors.clone().fill_diagonal_(0.0)
    if ranks > 1 and bool((foreign.abs() < _FITS).all()):
        return "each rank keeps the gradient of its own samples: nothing is added up over the ranks"
    if float(shown.max() - shown.min()) > _FITS:
        same = bool((shown - shown[0]).abs().max() < _FITS)
        listed = ", ".join(f"{float(one):.3g}" for one in shown[0][:8])
        who = "all ranks" if same else "rank 0"
        return (
            f"on {who} the ranks' own gradients are added up with the factors {listed} in place of ones: each was "
            "scaled by itself before, as when it is clipped by its own norm"
        )
    return _one_factor(float(shown.mean()), ranks, step, size, usual_size)


def _one_factor(factor: float, ranks: int, step: int, size: int, usual_size: int) -> str:
    if size < usual_size and step > 0:
        return (
            f"this window is partial, {size} samples where {usual_size} are usual, and its gradient is {factor:.3g} "
            "times the right one: divided by a usual count, not by that of the samples that are there"
        )
    if abs(factor - ranks) < _FITS * ranks:
        return f"the gradient is {ranks} times the right one: the sum of the ranks' means, not the mean over all"
    if abs(factor - 1 / ranks) < _FITS:
        return f"the gradient is 1/{ranks} of the right one: divided by the number of ranks once too often"
    return f"the gradient is {factor:.9g} times the right one"


def _factors(reference: Reference, gradients: torch.Tensor, step: int) -> torch.Tensor | None:
    """[rank that holds it, rank whose part it is]; None where no factors explain what the ranks hold."""
    parts = reference.parts[step]
    whole = parts.sum(0)
    clipped = float(reference.gradients[step] @ whole / (whole @ whole))
    has_share = parts.abs().sum(1) > 0
    base = (parts[has_share] * clipped).T
    found = torch.linalg.lstsq(base, gradients.T).solution
    if not bool(gradients.isfinite().all()):
        return None
    if float((base @ found - gradients.T).norm()) > _FITS * float(gradients.norm()):
        return None
    factors = torch.zeros(len(gradients), len(parts), dtype=torch.float64)
    factors[:, has_share] = found.T
    return factors
