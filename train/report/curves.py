"""Loss, metrics and speed over steps, of one run or of several in one picture."""

from __future__ import annotations

from collections.abc import Sequence

from train.report.ledger import Start
from train.report.read import Run, number
from train.report.svg import Line, Point, line_chart
from train.report.words import figure

_SPARSE = 60
CURVES: list[tuple[str, list[tuple[str, str]]]] = [
    ("Loss", [("loss", "training"), ("eval_loss", "validation")]),
    ("Validation accuracy", [("eval_accuracy", "accuracy")]),
    ("Throughput, items a second", [("items_per_s", "items a second")]),
    ("Gradient norm, before clipping", [("grad_norm", "norm")]),
    ("Learning rate", [("lr", "learning rate")]),
]
_KNOWN = {key for _, keys in CURVES for key, _ in keys} | {"step", "time_s"}


def points_of(run: Run, key: str) -> list[Point]:
    """(step, value) of what is a number."""
    pairs = ((row["step"], number(row.get(key))) for row in run.metrics)
    return [(float(step), value) for step, value in pairs if value is not None]


def curves(runs: Sequence[Run], marks: Sequence[tuple[float, str]] = ()) -> list[str]:
    """Figures: those that are always looked for, then whatever else the metrics hold."""
    more = sorted({key for run in runs for row in run.metrics[:200] for key in row} - _KNOWN)
    wanted = [*CURVES, *((key, [(key, key)]) for key in more[:8])]
    found = []
    for title, keys in wanted:
        lines = []
        for run in runs:
            for key, name in keys:
                points = points_of(run, key)
                if points:
                    label = f"{run.name}, {name}" if len(runs) > 1 else name
                    lines.append(Line(label, points, has_dots=len(points) <= _SPARSE and key.startswith("eval")))
        if lines:
            found.append(figure(title, line_chart(lines, marks)))
    return found


def restart_marks(starts: Sequence[Start]) -> list[tuple[float, str]]:
    """Where curves go on after a start."""
    few = len(starts) <= 6
    return [
        (start.first_step, f"restart {count}" if few else str(count)) for count, start in enumerate(starts) if count
    ]
