"""Who holds up the others: each rank's own part of a step (data, computing, optimizer) beside the median rank's."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from train.report.ledger import BUSY, Start
from train.report.read import RankTimes, Sample
from train.seam import Activity

MOST_SLOTS = 60
SLOW = 1.2
"""So many times the median, and a rank is called slow."""


@dataclass(frozen=True)
class Heat:
    """Ranks × time."""

    ranks: list[int]
    slots: list[tuple[float, float]]
    """Begin and end of each, by the wall clock."""
    ratios: list[list[float | None]]
    """For each rank, in each slot: its own time a step, in medians; None where it did no step."""
    restarts: list[int]
    """Before which slots a start begins, the first apart."""
    is_blind: bool
    """Ranks could not tell waiting from computing, as on GPUs."""

    def mean(self, index: int) -> float:
        """Of one rank over all slots it worked in; 0 where there are none."""
        told = [ratio for ratio in self.ratios[index] if ratio is not None]
        return sum(told) / len(told) if told else 0.0


def heat_of(starts: list[Start]) -> Heat:
    """From what ranks told in all starts."""
    ranks = sorted({rank for start in starts for sample in start.samples for rank in sample.ranks})
    total_s = sum(start.ended - start.began for start in starts) or 1.0
    slots: list[tuple[float, float]] = []
    ratios: list[list[float | None]] = [[] for _ in ranks]
    restarts = []
    waited_s = 0.0
    for start in starts:
        if slots and start.samples:
            restarts.append(len(slots))
        for early, late in _pairs(start, max(1, round(MOST_SLOTS * (start.ended - start.began) / total_s))):
            own = {rank: own_ms(early.ranks.get(rank), late.ranks.get(rank)) for rank in ranks}
            usual = median([value for value in own.values() if value is not None])
            for row, rank in zip(ratios, ranks, strict=True):
                value = own[rank]
                row.append(value / usual if value is not None and usual else None)
            slots.append((early.time, late.time))
        last = start.last
        waited_s += sum(told.seconds[Activity.WAITING] for told in last.ranks.values() if told.seconds) if last else 0.0
    if not any(ratio is not None for row in ratios for ratio in row):
        slots = []
    return Heat(ranks, slots, ratios, restarts, is_blind=len(ranks) > 1 and waited_s == 0)


def own_ms(early: RankTimes | None, late: RankTimes | None) -> float | None:
    """A rank's own milliseconds a step between two moments; None where it did no step."""
    if early is None or late is None or late.step <= early.step or not early.seconds or not late.seconds:
        return None
    spent_s = sum(late.seconds[activity] - early.seconds[activity] for activity in BUSY)
    return 1000 * spent_s / (late.step - early.step)


def median(values: list[float]) -> float:
    """The lower one of two in the middle: of two ranks the quick one is the measure."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _pairs(start: Start, count: int) -> list[tuple[Sample, Sample]]:
    """Samples that cut a start's time into `count` pieces of about equal length."""
    samples = [sample for sample in start.samples if any(told.step > 0 for told in sample.ranks.values())]
    if len(samples) < 2:
        return []
    times = [sample.time for sample in samples]
    length_s = (times[-1] - times[0]) / count
    cuts = [bisect_right(times, times[0] + length_s * index + 1e-6) - 1 for index in range(count + 1)]
    cuts = list(dict.fromkeys([*cuts, len(times) - 1]))
    return [(samples[a], samples[b]) for a, b in pairwise(cuts) if b > a]
