"""How far each way is from what is right, as rows, a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from train.checks.verify.cases import BF16, EXACT, Case
from train.checks.verify.diagnosis import explain
from train.checks.verify.reference import Reference
from train.checks.verify.training import Trained
from train.runtime import Runtime
from train.seam import Phase


@dataclass(frozen=True)
class Row:
    """One case on all ranks."""

    name: str
    gradients: float
    """Largest difference from the reference, over ranks, steps and parameters."""
    weights: float
    between_ranks: float
    """Largest |Δ| between rank 0's gradients and another rank's."""
    limit: float
    is_relative: bool
    worst_rank: int
    words: str = ""
    """Why it is not the same; empty where it is."""

    @property
    def is_same(self) -> bool:
        """Whether everything is within the limit."""
        return max(self.gradients, self.weights, 0.0 if self.is_relative else self.between_ranks) <= self.limit


def compare(case: Case, trained: Trained, reference: Reference, runtime: Runtime) -> Row:
    """This case's row, the same on all ranks: what each rank saw, against the reference and against each other."""
    gradients = _gathered(torch.stack(trained.gradients), runtime)
    weights = _gathered(torch.stack(trained.weights), runtime)
    initial = _gathered(trained.initial, runtime)
    of_gradients = distances(gradients, reference.gradients, reference.gradients, relative=case.is_relative)
    way = reference.weights - reference.initial
    of_weights = distances(weights, reference.weights, way, relative=case.is_relative)
    between = float((gradients - gradients[0]).abs().nan_to_num(nan=float("inf")).max())
    row = Row(
        case.name, float(of_gradients.max()), float(of_weights.max()), between, case.limit, case.is_relative,
        int(torch.maximum(of_gradients, of_weights).argmax()),
    )  # fmt: skip
    if row.is_same:
        return row
    # In bf16 what is rounded is not told apart from what is wrong: say only how wrong it is.
    words = "further off than rounding can be" if case.is_relative else explain(
        reference, initial, gradients, case.limit, case.config.batch.global_size
    )  # fmt: skip
    return Row(**{**row.__dict__, "words": words})


def distances(got: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, *, relative: bool) -> torch.Tensor:
    """The largest of each rank's [ranks, steps, numbers]: |Δ|, or a step's |Δ|₂ over the scale's. Infinite for NaN."""
    off = got - right
    found = off.norm(dim=2).div(scale.norm(dim=1)).amax(1) if relative else off.abs().amax((1, 2))
    return found.nan_to_num(nan=float("inf"))


def _gathered(mine: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """Each rank's, in rank order: as the tutorial compares gradients."""
    if not runtime.joined:
        return mine[None]
    theirs = [torch.empty_like(mine) for _ in range(runtime.world_size)]
    dist.all_gather(theirs, mine.contiguous(), group=runtime.group(Phase.SAVING))
    return torch.stack(theirs)


def heading() -> str:
    """Above the rows."""
    return f"{'way to train':<34}{'Δ gradients':>13}{'Δ weights':>13}{'between ranks':>15}   verdict"


def line(row: Row) -> str:
    """A row of the table."""
    verdict = "the same" if row.is_same else "NOT the same"
    kind = " (relative)" if row.is_relative else ""
    return f"{row.name[:33]:<34}{row.gradients:>13.1e}{row.weights:>13.1e}{row.between_ranks:>15.1e}   {verdict}{kind}"


def as_json(facts: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The certificate."""
    limits = {"float64_max_abs": EXACT, "bf16_relative": BF16}
    return {**facts, "limits": limits, "same": all(row.is_same for row in rows), "rows": [
        {"way": row.name, "gradients": _number(row.gradients), "weights": _number(row.weights),
         "between_ranks": _number(row.between_ranks), "limit": row.limit, "relative": row.is_relative,
         "same": row.is_same, "why": row.words or None} for row in rows
    ]}  # fmt: skip


def _number(value: float) -> float | None:
    return value if value != float("inf") else None
