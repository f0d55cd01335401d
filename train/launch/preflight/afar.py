"""A preflight on hosts from afar, for launchers: each host's words, and from what all said to a verdict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from train.launch.preflight.command import checked_floors
from train.launch.preflight.conclusion import Told, conclude, reports_in
from train.launch.request import plan_from

WAIT_S = 180.0
"""For a host's answer: loading torch takes seconds, on a very busy host minutes."""


def words_of(
    names: Sequence[str], variables: Mapping[str, Mapping[str, Any]], device: str, floors: Sequence[str]
) -> dict[str, list[str]]:
    """For each host what follows `python -m train preflight`, but for the run folder. Raises UsageError.

    Args:
        names: hosts that can take part, in rank order.
        variables: each host's `address` and `slots`.
        device: cpu or cuda.
        floors: more options, as a user gives them.
    """
    checked_floors(floors)
    plan = plan_from(names, variables)
    text = json.dumps(plan.as_dict())
    return {
        host.name: ["--plan", text, "--node-rank", str(rank), "--device", device, *floors]
        for rank, host in enumerate(plan.hosts)
    }


def lost_of(probes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Hosts that cannot take part, and why, by what was told when they were probed."""
    why = {name: p.get("unreachable_why") or "; ".join(p.get("problems") or []) for name, p in probes.items()}
    why |= {name: str(probe["msg"]) for name, probe in probes.items() if probe.get("failed")}
    images = {name: str(probe["image"]) for name, probe in probes.items() if probe.get("image") and not why[name]}
    usual = statistics.mode(images.values()) if images else ""
    why |= {
        name: f"its image is {image[:19]}, elsewhere {usual[:19]}: send the same one (provision.yml, fab push --image)"
        for name, image in images.items()
        if image != usual
    }
    return {name: words for name, words in why.items() if words}


def said_of(told: Mapping[str, Any]) -> str:
    """What a host has said, or why it has not."""
    if told.get("said"):
        return str(told["said"])
    return str(told.get("msg") or told.get("unreachable_why") or "; ".join(told.get("problems") or []))


def verdict(
    names: Sequence[str], variables: Mapping[str, Mapping[str, Any]], said: Mapping[str, str], lost: Mapping[str, str],
    file: str = "",
) -> Told:  # fmt: skip
    """Judge it.

    Args:
        names: hosts that took part, in rank order.
        variables: as for `words_of`.
        said: what each one has printed.
        lost: hosts that could not take part, and why.
        file: a quarantine, for those that are not fit.
    """
    plan = plan_from(names, variables) if names else None
    reports = reports_in("\n".join(said.values()))
    silent = {name: _last_line(said.get(name, "")) for name in names}
    told = conclude(plan, reports, silent, lost, file or None)
    head, _, last = told.words.rpartition("\n")
    return replace(told, words="\n".join(filter(None, (head, told.note, last))))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it told nothing"
