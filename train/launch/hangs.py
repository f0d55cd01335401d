"""Who hangs, from what was found on every rank: process states, stacks, and the Flight Recorder's collectives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/_ops", "/torch/autograd/")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


def who_hangs(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int | None, str, list[str]]:
    """The rank the others wait for, why it is that one, and the lines that show it.

    Args:
        evidence: by rank: `state` of the process as in proc(5), `stack` as faulthandler wrote it, `flight` as
            `train/evidence.py` wrote it, `code` where it has ended. Whatever could not be had is missing.
        hosts: by rank: its host's name.

    Returns:
        The rank, or None where none stands out; words that say so; evidence.
    """
    for find in (_stopped, _unheard, _behind, _ended, _elsewhere):
        found = find(evidence, hosts)
        if found is not None:
            rank, words = found
            return rank, words, stack_of(evidence[rank])
    places = {rank: place_of(told) or "unknown" for rank, told in sorted(evidence.items())}
    lines = [f"rank {rank} ({hosts[rank]}): {place}" for rank, place in places.items()]
    return None, _apart(places) or "all ranks wait, and none is seen to be behind the others", lines


def _apart(places: Mapping[int, str]) -> str | None:
    """Words for ranks that wait in different places: one has left out a collective, or has one too many."""
    by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_place.setdefault(place, []).append(rank)
    if not 1 < len(by_place) <= 4 or "unknown" in by_place:
        return None
    told = ", ".join(f"{_ranks(ranks, 'is', 'are')} in {place}" for place, ranks in by_place.items())
    return f"the ranks wait for each other in different places: {told}; one of them has gone another way"


def _stopped(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int, str] | None:
    for rank, told in sorted(evidence.items()):
        if told.get("state") in ("T", "t"):
            return rank, f"rank {rank} ({hosts[rank]}) is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    return None


def _unheard(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int, str] | None:
    for rank, told in sorted(evidence.items()):
        if "state" not in told:
            return rank, f"nothing could be learnt of rank {rank}: its host {hosts[rank]} does not answer"
    return None


def _behind(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int, str] | None:
    """The rank that has not entered a collective in which others wait."""
    groups: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, told in evidence.items():
        for group in (told.get("flight") or {}).get("groups", ()):
            groups.setdefault(group["name"], {})[rank] = group
    for by_rank in groups.values():
        lasts = {rank: group["last"] for rank, group in by_rank.items()}
        newest, least = max(lasts.values()), min(lasts.values())
        ahead = [rank for rank, last in lasts.items() if last > least and _waits(by_rank[rank], least + 1)]
        if newest == least or not ahead:
            continue
        rank = min(rank for rank, last in lasts.items() if last == least)
        entry = next(e for e in by_rank[ahead[0]]["entries"] if e["seq"] == least + 1)
        place = place_of(evidence[rank])
        it_is = f"it is in {place}" if place else "where it is could not be seen"
        others = _ranks([r for r in sorted(lasts) if lasts[r] > least])
        return rank, (
            f"rank {rank} ({hosts[rank]}) has not entered {_name(entry)} #{least + 1}; {it_is}; "
            f"{others} for {entry['age_s']:.0f} s"
        )
    return None


def _waits(group: Mapping[str, Any], number: int) -> bool:
    return any(entry["seq"] == number and not entry["retired"] for entry in group["entries"])


def _name(entry: Mapping[str, Any]) -> str:
    """`gloo:all_reduce` is an all-reduce."""
    return str(entry["op"]).rpartition(":")[2].strip("_").replace("all_", "all-").replace("_", " ")


def _ended(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int, str] | None:
    """The rank that has come to its end while others still wait for it."""
    over = sorted(rank for rank, told in evidence.items() if told.get("code") == 0)
    if over and len(over) < len(evidence):
        waiting = _ranks(sorted(set(evidence) - set(over)))
        return over[0], f"rank {over[0]} ({hosts[over[0]]}) has come to its end already; {waiting} for it"
    return None


def _elsewhere(evidence: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[int, str] | None:
    """By stacks alone: the rank that is not in a collective while the others are."""
    frames = {rank: frames_of(told.get("stack") or ()) for rank, told in evidence.items()}
    waiting = {rank for rank, its in frames.items() if any(mark in file for file, _, _ in its for mark in _WAITING)}
    away = sorted(rank for rank, its in frames.items() if its and rank not in waiting)
    if waiting and away:
        rank = away[0]
        return rank, f"rank {rank} ({hosts[rank]}) is in {place_of(evidence[rank])}; {_ranks(sorted(waiting))} for it"
    return None


def frames_of(stack: Sequence[str]) -> list[tuple[str, int, str]]:
    """(file, line, function) of the thread that faulthandler calls current, innermost first."""
    frames: list[tuple[str, int, str]] = []
    is_current = False
    for line in stack:
        if "(most recent call first)" in line:
            is_current = line.startswith("Current thread")
        match = _FRAME.match(line)
        if match and is_current:
            frames.append((match["file"], int(match["line"]), match["function"]))
    return frames


def place_of(told: Mapping[str, Any]) -> str | None:
    """`data.py:88 (read)`: where a rank is, in code that is the user's or ours if there is any on its stack."""
    frames = frames_of(told.get("stack") or ())
    if frames:
        own = next((frame for frame in frames if not any(mark in frame[0] for mark in _LIBRARY)), frames[0])
        return f"{own[0].rpartition('/')[2]}:{own[1]} ({own[2]})"
    own_line = (told.get("flight") or {}).get("at")
    if own_line:
        where, _, function = str(own_line).partition(" ")
        return f"{where.rpartition('/')[2]} ({function})"
    return None


def stack_of(told: Mapping[str, Any]) -> list[str]:
    """A rank's stack, to be shown: innermost first."""
    frames = [f"{file}:{line} {function}" for file, line, function in frames_of(told.get("stack") or ())]
    return (frames or list(reversed((told.get("flight") or {}).get("stack") or ())))[:12]


def _ranks(ranks: Sequence[int], one: str = "waits", many: str = "wait") -> str:
    """`ranks 0-2 wait`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"ranks {told} {many}"
