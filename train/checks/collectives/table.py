"""What was measured, as tables of at most 100 columns, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from train.checks.collectives.correctness import Outcome
from train.checks.collectives.pairs import Links
from train.checks.collectives.timing import Timing

_WIDEST_MATRIX = 10


def of_outcomes(outcomes: Sequence[Sequence[Outcome]]) -> list[str]:
    """A row an operation, a column a type; `outcomes` by rank."""
    names = list(dict.fromkeys(one.operation for one in outcomes[0]))
    dtypes = list(dict.fromkeys(one.dtype for one in outcomes[0]))
    lines = [f"{'right?':<16}" + "".join(f"{dtype:>12}" for dtype in dtypes)]
    for name in names:
        cells = [_judged([one for rank in outcomes for one in rank if (one.operation, one.dtype) == (name, dtype)])
                 for dtype in dtypes]  # fmt: skip
        lines.append(f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells))
    lacking = dict.fromkeys(f"{one.operation}: {one.lacking}" for rank in outcomes for one in rank if one.lacking)
    return [*lines, *lacking]


def _judged(theirs: Iterable[Outcome]) -> str:
    theirs = list(theirs)
    wrong = sum(1 for one in theirs if one.problem)
    if wrong:
        return f"{wrong} WRONG"
    return "-" if any(one.lacking for one in theirs) else "yes"


def heading() -> str:
    """Above the rows of `of_timing`."""
    return f"{'operation':<16}{'size':>10}{'calls':>8}{'time':>12}{'algbw GB/s':>13}{'busbw GB/s':>13}"


def of_timing(one: Timing) -> str:
    """A row."""
    start = f"{one.operation:<16}{in_bytes(one.size_bytes) if one.size_bytes else '':>10}"
    if not one.calls:
        return f"{start}  not measured: it would take longer than --seconds leaves"
    row = f"{start}{one.calls:>8}{in_time(one.time_s):>12}"
    return f"{row}{one.algorithm_gb_s:>13.3f}{one.bus_gb_s:>13.3f}" if one.size_bytes else row


def of_links(links: Links) -> list[str]:
    """A matrix; of many members the best and the worst link of each."""
    everyone = range(len(links.names))
    if len(links.names) > _WIDEST_MATRIX:
        return ["MB/s a link, best and worst of each", f"{'':<24}{'out':>22}{'in':>22}", *(
            f"{links.names[i][:23]:<24}{_ends([links.mb_s[i][j] for j in everyone if j != i]):>22}"
            f"{_ends([links.mb_s[j][i] for j in everyone if j != i]):>22}" for i in everyone
        )]  # fmt: skip
    wide = max(8, 70 // max(1, len(links.names)) if len(links.names) > 8 else 9)
    lines = ["MB/s from row to column" + f"{'':<6}(round trip, median: {in_time(_median_trip(links))})"]
    lines.append(f"{'':<16}" + "".join(f"{name[: wide - 1]:>{wide}}" for name in links.names))
    for i in everyone:
        cells = ("·" if i == j else f"{links.mb_s[i][j]:,.0f}" for j in everyone)
        lines.append(f"{links.names[i][:15]:<16}" + "".join(f"{cell:>{wide}}" for cell in cells))
    return lines


def _ends(speeds: Sequence[float]) -> str:
    return f"{max(speeds):,.0f} … {min(speeds):,.0f}"


def _median_trip(links: Links) -> float:
    known = sorted(trip for row in links.round_trip_us for trip in row if not math.isnan(trip))
    return known[len(known) // 2] / 1e6 if known else 0.0


def in_bytes(size: int) -> str:
    """`64 KiB`, or the plain number where it is not whole."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size // step} {unit}" if size % step == 0 else f"{size / step:.1f} {unit}"
    return f"{size} B"


def in_time(seconds: float) -> str:
    """Three digits that count."""
    for unit, step in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= step:
            return f"{seconds / step:.3g} {unit}" if seconds < 1000 * step else f"{seconds:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def as_json(
    facts: dict[str, Any], outcomes: Sequence[Sequence[Outcome]], timings: Sequence[Timing], links: Links | None
) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {**facts, "problems": [one.problem for rank in outcomes for one in rank if one.problem]}
    found["right"] = [
        {"operation": mine.operation, "dtype": mine.dtype, "not_tried": mine.lacking or None,
         "wrong_on_ranks": [rank for rank, theirs in enumerate(outcomes) if theirs[place].problem]}
        for place, mine in enumerate(outcomes[0])
    ]  # fmt: skip
    found["timings"] = [
        {"operation": one.operation, "size_bytes": one.size_bytes, "calls": one.calls,
         "time_us": one.time_s * 1e6 if one.calls else None, "algbw_gb_s": one.algorithm_gb_s if one.calls else None,
         "busbw_gb_s": one.bus_gb_s if one.calls else None}
        for one in timings
    ]  # fmt: skip
    if links is not None:
        found["links"] = {
            "names": links.names, "mb_s": _without_nan(links.mb_s), "round_trip_us": _without_nan(links.round_trip_us),
            "findings": links.findings,
        }  # fmt: skip
    return found


def _without_nan(matrix: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [[None if math.isnan(cell) else cell for cell in row] for row in matrix]
