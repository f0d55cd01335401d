"""What hosts tell of the launches that they know, put together: who runs where, which one is meant, how they ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from train.launch.ending import verdict, words_with_code
from train.seam import Exit

Told = Mapping[str, Mapping[str, Any]]
"""For each host: `launches` that it knows, newest first, or `unreachable_why`, or `problems`."""
_LONGEST = 60


def status(hosts: Told, *, all_of_them: bool = False) -> list[str]:
    """A table of what runs; with `all_of_them` also of what has ended."""
    rows: list[Sequence[str]] = [("host", "launch", "run", "by", "since", "ranks", "step", "state", "last line")]
    for name, told in hosts.items():
        known = [each for each in told.get("launches", []) if all_of_them or each["running"]]
        for each in known:
            since = time.strftime("%F %H:%M", time.localtime(each["since"]))
            step = "" if each.get("step") is None else str(each["step"])
            line = str(each.get("last_line", ""))[:_LONGEST]
            run = each.get("run_id") or "not known yet"
            rows.append((name, each["id"], run, each["by"], since, _ranks(each), step, _state(each), line))
        if not known:
            rows.append((name, _why(told) or ("nothing is known" if all_of_them else "nothing runs")))
    whole = [row for row in rows if len(row) > 2]
    widths = [max(len(row[0]) for row in rows), *(max(len(row[i]) for row in whole) for i in range(1, len(rows[0])))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _ranks(launch: Mapping[str, Any]) -> str:
    count = launch.get("slots", "?")
    return f"{count} of {launch['world_size']}" if launch.get("world_size") else str(count)


def _state(launch: Mapping[str, Any]) -> str:
    if not launch["running"]:
        code = launch.get("exit_code")
        return f"ended with {code}" if code is not None else "ended"
    age_s = launch.get("age_s")
    silent = f", silent for {age_s:.0f} s" if age_s is not None and age_s > 10 else ""
    return f"{launch.get('phase', 'starting')}{silent}"


def _why(told: Mapping[str, Any]) -> str:
    """Why a host tells nothing."""
    if told.get("unreachable_why"):
        return f"cannot be reached: {told['unreachable_why']}"
    return "; ".join(map(str, told.get("problems", [])))


def silent(hosts: Told) -> list[str]:
    """Hosts that told nothing, and why."""
    return [f"{name}: {_why(told)}" for name, told in hosts.items() if _why(told)]


def pick(hosts: Told, launch: str = "", run_id: str = "", *, running: bool = False) -> dict[str, Any] | None:
    """The newest launch that is meant, with `hosts`, what each of its hosts tells of it; None where there is none."""
    known: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, told in hosts.items():
        for each in told.get("launches", []):
            known.setdefault(each["id"], {})[name] = each
    for number in sorted(known, reverse=True):
        if launch not in ("", number):
            continue
        if run_id and run_id not in {each.get("run_id") for each in known[number].values()}:
            continue
        if running and not any(each["running"] for each in known[number].values()):
            continue
        one = next(iter(known[number].values()))
        return {
            "id": number, "by": one["by"], "grace_s": one.get("grace_s", 300.0), "hosts": known[number],
            "names": [name for name in one.get("names", known[number]) if name in known[number]],
        }  # fmt: skip
    return None


def stopped(hosts: Told, ends: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What became of the launches that were asked to stop.

    Args:
        hosts: what each host said when it was asked; its `launches` are those that it asked.
        ends: how they ended there, in the same order.

    Returns:
        lines, and whether all ended in good order, on hosts that all answered
    """
    problems = silent(hosts)
    asked: dict[str, dict[str, Mapping[str, Any]]] = {}
    names: dict[str, list[str]] = {}
    for name, told in hosts.items():
        for each, end in zip(told.get("launches", []), ends.get(name, []), strict=False):
            asked.setdefault(each["id"], {})[name] = end
            names[each["id"]] = each.get("names", [])
    lines, codes = [], []
    for number, told_by in asked.items():
        found = verdict([name for name in names[number] if name in told_by] or [*told_by], told_by)
        codes.append(found["exit_code"])
        lines.append(f"launch {number}: {words_with_code(found)}")
    if not asked:
        lines.append("nothing runs that is meant")
    is_good = not problems and all(code in (Exit.FINISHED, Exit.STOPPED_SAVED) for code in codes)
    return {"lines": [f"muster: {line}" for line in [*problems, *lines]], "is_good": is_good}
