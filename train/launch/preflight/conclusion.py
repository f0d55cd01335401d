"""From what hosts have said to what a launcher has to say: the words, and the exit code."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.launch.preflight import findings as found_things
from train.launch.preflight import quarantine
from train.launch.preflight.asked import Asked
from train.launch.preflight.findings import ERROR, Finding
from train.launch.preflight.judge import judge
from train.launch.topology import Plan

MARK = "muster-preflight "
"""A report's lines start with it."""
_PIECE = 700


@dataclass(frozen=True)
class Told:
    """How a preflight ended."""

    words: str
    """A table, or JSON."""
    exit_code: int
    note: str = ""
    """On the quarantine."""


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """A report in short lines: srun cuts long ones into pieces, and puts its labels between them."""
    text = base64.b64encode(json.dumps(report).encode()).decode()
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return [f"{MARK}{report['node_rank']} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces)]


def reports_in(text: str) -> list[dict[str, Any]]:
    """All whole reports among other lines, whatever stands before them in a line (a label); by node rank."""
    pieces: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in text.splitlines():
        words = line.partition(MARK)[2].split()
        if len(words) == 4 and all(word.isdecimal() for word in words[:3]):
            rank, number = int(words[0]), int(words[1])
            counts[rank] = int(words[2])
            pieces.setdefault(rank, {})[number] = words[3]
    reports = []
    for rank in sorted(pieces):
        whole = "".join(pieces[rank].get(number, "?") for number in range(counts[rank]))
        with contextlib.suppress(ValueError):  # cut short
            reports.append(json.loads(base64.b64decode(whole, validate=True)))
    return reports


def conclude(
    plan: Plan | None,
    reports: Sequence[Mapping[str, Any]],
    silent: Mapping[str, str],
    lost: Mapping[str, str],
    file: str | None = None,
    *,
    as_json: bool = False,
) -> Told:
    """Judge what hosts have told.

    Args:
        plan: of those that took part; None where nobody could.
        reports: of those that told something.
        silent: why others of the plan told nothing, where that is known.
        lost: hosts that could not take part, and why.
        file: a quarantine, for those that are not fit.
        as_json: in place of a table.
    """
    names = [] if plan is None else [host.name for host in plan.hosts]
    told = {report["name"] for report in reports}
    asked = Asked.of(reports[0]["asked"]) if reports else Asked()
    found = [Finding("answer", ERROR, (name,), why) for name, why in lost.items()]
    if plan is not None:
        dumb = {name: silent.get(name) or "it told nothing" for name in names if name not in told}
        found += judge(plan, reports, asked, dumb)
    took_s = max((report["took_s"] for report in reports), default=0.0)
    everybody = [*names, *lost]
    if as_json:
        words = json.dumps(found_things.as_dict(found, everybody, took_s), indent=1)
    else:
        words = found_things.table(found, len(everybody), took_s)
    note = ""
    if file:
        new = quarantine.add(Path(file).expanduser(), found_things.bad_hosts(found))
        note = f"muster: {', '.join(new) or 'nobody'} added to {file}"
    return Told(words, int(found_things.exit_code(found)), note)
