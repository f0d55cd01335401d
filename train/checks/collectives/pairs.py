"""Every link by itself: each pair sends back and forth while others do the same, and one slow host stands out.

Rounds of disjoint pairs, as in a round-robin tournament: n hosts take n - 1 rounds (n of an odd number), not
n (n - 1) / 2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from train.checks.collectives.base import Place, synchronise

_SMALL_BYTES = 1 << 18
_ENOUGH_S = 0.05
_ROUND_TRIPS = 20
SLOW_SHARE = 0.5
"""A link is slow that carries less than this share of what a usual one does."""


@dataclass
class Links:
    """What each ordered pair of members carries."""

    names: list[str]
    mb_s: list[list[float]]
    """10^6 bytes a second from row to column; NaN on the diagonal."""
    round_trip_us: list[list[float]]
    findings: list[str] = field(default_factory=list)
    """What is slow, in words."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` members, in rounds in which nobody has two (the circle method: one stays, the rest turn)."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(a, b) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


Measured = dict[tuple[int, int], tuple[float, float]]
"""(MB a second, round trip in µs) by (from, to), members' numbers."""


def measure_pairs(members: Sequence[int], at: Place, size_bytes: int) -> Iterator[Measured]:
    """What this rank has measured as a sender, after each round.

    Args:
        members: ranks of the group, one a host or all; the others only keep time.
        at: this rank's place.
        size_bytes: a message's size.
    """
    me = members.index(at.rank) if at.rank in members else None
    for pairs in rounds(len(members)):
        mine: Measured = {}
        dist.barrier(group=at.group)
        for first, second in pairs:
            if me in (first, second):
                other = second if me == first else first
                peer = members[other]
                for sends in (me == first, me != first):
                    if sends:
                        mine[me, other] = _send(at, peer, size_bytes)
                    else:
                        _receive(at, peer, size_bytes)
        yield mine


def _send(at: Place, peer: int, size_bytes: int) -> tuple[float, float]:
    """The sender keeps the time: from the first byte to the word that the last one has come."""
    word = torch.zeros(1, dtype=torch.int64, device=at.device)
    trips = []
    for _ in range(_ROUND_TRIPS):
        began_s = time.perf_counter()
        _put(word, at, peer)
        _get(word, at, peer)
        trips.append(time.perf_counter() - began_s)
    small_s = _transfer(at, peer, min(size_bytes, _SMALL_BYTES), word)
    calls = 0 if small_s > _ENOUGH_S else int(max(1, min(8, _ENOUGH_S * 4 / (small_s * size_bytes / _SMALL_BYTES))))
    _put(torch.full_like(word, calls), at, peer)
    carried, spent_s = min(size_bytes, _SMALL_BYTES), small_s
    if calls:
        carried, spent_s = size_bytes * calls, sum(_transfer(at, peer, size_bytes, word) for _ in range(calls))
    return carried / spent_s / 1e6, statistics.median(trips) * 1e6


def _transfer(at: Place, peer: int, size_bytes: int, word: torch.Tensor) -> float:
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=at.device)
    synchronise(at)
    began_s = time.perf_counter()
    _put(message, at, peer)
    _get(word, at, peer)
    return time.perf_counter() - began_s


def _receive(at: Place, peer: int, size_bytes: int) -> None:
    word = torch.zeros(1, dtype=torch.int64, device=at.device)
    for _ in range(_ROUND_TRIPS):
        _get(word, at, peer)
        _put(word, at, peer)
    _take(at, peer, min(size_bytes, _SMALL_BYTES), word)
    _get(word, at, peer)
    for _ in range(int(word)):
        _take(at, peer, size_bytes, word)


def _take(at: Place, peer: int, size_bytes: int, word: torch.Tensor) -> None:
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=at.device)
    _get(message, at, peer)
    _put(torch.zeros_like(word), at, peer)


def _put(tensor: torch.Tensor, at: Place, peer: int) -> None:
    dist.send(tensor, group=at.group, group_dst=peer)
    synchronise(at)


def _get(tensor: torch.Tensor, at: Place, peer: int) -> None:
    dist.recv(tensor, group=at.group, group_src=peer)
    synchronise(at)


def links_of(names: Sequence[str], told: Sequence[Measured], *, judged: bool) -> Links:
    """All that the ranks have measured, put together; and judged, where they are of several hosts."""
    count = len(names)
    mb_s = [[float("nan")] * count for _ in range(count)]
    trips = [[float("nan")] * count for _ in range(count)]
    for theirs in told:
        for (sender, receiver), (speed, trip_us) in theirs.items():
            mb_s[sender][receiver], trips[sender][receiver] = speed, trip_us
    return Links([*names], mb_s, trips, slow(names, mb_s) if judged else [])


def slow(names: Sequence[str], mb_s: Sequence[Sequence[float]], share: float = SLOW_SHARE) -> list[str]:
    """Which host, or which single link, is slow, in words.

    A host whose *best* link is slow is slow itself: its links to good hosts are slow too, while a good host has a good
    link to another one. What is usual is the median of the hosts' best links. Two hosts have one link: nobody can say
    which end of it is slow.
    """
    everyone = range(len(names))
    if len(names) < 3:
        return []
    best_out = [max(mb_s[i][j] for j in everyone if j != i) for i in everyone]
    best_in = [max(mb_s[j][i] for j in everyone if j != i) for i in everyone]
    usual = statistics.median([*best_out, *best_in])
    slow_out = {i for i in everyone if best_out[i] < share * usual}
    slow_in = {i for i in everyone if best_in[i] < share * usual}
    found = []
    for i in sorted(slow_out | slow_in):
        how = "is slow" if i in slow_out & slow_in else "sends slowly" if i in slow_out else "receives slowly"
        found.append(
            f"{names[i]} {how}: at best {best_out[i]:,.0f} MB/s out and {best_in[i]:,.0f} MB/s in, where "
            f"{usual:,.0f} MB/s is usual here: look at its cable, port, negotiated speed and what else it sends"
        )
    found += [
        f"the link {names[i]} → {names[j]} alone is slow: {mb_s[i][j]:,.0f} MB/s where {usual:,.0f} MB/s is usual here"
        for i in everyone
        for j in everyone
        if i != j and i not in slow_out and j not in slow_in and mb_s[i][j] < share * usual
    ]
    return found
