"""From what hosts have said to what a launcher has to say: the words, and the exit code."""

from __future__ import annotations

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
"""A report's line starts with it."""


@dataclass(frozen=True)
class Told:
    """How a preflight ended."""

    words: str
    """A table, or JSON."""
    exit_code: int
    note: str = ""
    """On the quarantine."""


def reports_in(text: str) -> list[dict[str, Any]]:
    """All reports among other lines, whatever stands before them in a line (a label); by node rank."""
    reports: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        _, mark, told = line.partition(MARK)
        try:
            report = json.loads(told) if mark else None
        except ValueError:  # cut short
            continue
        if isinstance(report, dict) and "facts" in report:
            reports[int(report["node_rank"])] = report
    return [reports[rank] for rank in sorted(reports)]


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
