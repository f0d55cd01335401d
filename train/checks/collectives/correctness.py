"""Whether operations give what they must, on this rank: compared number by number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from train.checks.collectives.base import Buffers, Operation, Place, synchronise
from train.checks.collectives.values import DTYPES

COUNTS = (1, 1009)
"""Elements of a part: the least there is, and a prime, so that nothing divides evenly into chunks."""
_LACKING = re.compile(r"not (supported|implemented|available)|unsupported|does(n't| not) support", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """One operation in one type, as this rank saw it."""

    operation: str
    dtype: str
    problem: str = ""
    """What was wrong, in words; empty: nothing."""
    lacking: str = ""
    """Why it could not be tried; the same on all ranks."""


def prove(operation: Operation, at: Place, dtype: str, counts: Sequence[int] = COUNTS) -> Outcome:
    """Call it once for each count, and look at what came. A rank that sees something wrong goes on with the others."""
    if at.size < operation.least_ranks:
        return Outcome(operation.name, dtype, lacking=f"needs {operation.least_ranks} ranks")
    problems = []
    for count in counts:
        buffers = operation.buffers(at, DTYPES[dtype], count)
        try:
            operation.prove(buffers, at)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if not _LACKING.search(str(error)):
                raise
            return Outcome(operation.name, dtype, lacking=f"not offered: {str(error).strip().splitlines()[0][:120]}")
        synchronise(at)
        problems.append(difference(operation, buffers, at, dtype, count))
    return Outcome(operation.name, dtype, next(filter(None, problems), ""))


def prove_all(operations: Iterable[Operation], at: Place, dtypes: Iterable[str] = DTYPES) -> list[Outcome]:
    """Each operation in each type; one that carries no data in the first alone."""
    return [
        prove(operation, at, dtype)
        if operation.has_data or not number
        else Outcome(operation.name, dtype, lacking="has no type: tried once")
        for operation in operations
        for number, dtype in enumerate(dtypes)
    ]


def difference(operation: Operation, buffers: Buffers, at: Place, dtype: str, count: int) -> str:
    """The first number that is not as it must be, in words; empty where all are."""
    expected = operation.expected(at, DTYPES[dtype], count)
    if expected is None or torch.equal(buffers.into, expected):
        return ""
    wrong = (buffers.into != expected).nonzero().flatten()
    first = int(wrong[0])
    return (
        f"{operation.name} in {dtype} is wrong on rank {at.rank} of {at.size}: element {first} must be "
        f"{expected[first].item():g}, but is {buffers.into[first].item():g} "
        f"({len(wrong)} of {len(expected)} elements are wrong)"
    )
