"""Where the time went: each start's wall time, shared out over what each rank did in it, to the last second."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.report.read import Run, Sample, number
from train.seam import Activity

LOST, GONE, RESTARTING, UNTOLD = "lost", "gone", "restarting", "untold"
CATEGORIES: dict[str, str] = {
    "computing": "forward and backward",
    "data": "waiting for data",
    "optimizer": "optimizer",
    "waiting": "waiting for other ranks (all-reduce)",
    "other": "metrics, comparison of replicas",
    "evaluation": "evaluation",
    "saving": "saving",
    LOST: "steps lost and done again",
    "loading": "starting Python and torch",
    "joining": "joining the other ranks",
    "preparing": "data, model, checkpoint",
    "first step": "the first step",
    "ending": "ending: summary, a sample",
    GONE: "ended before the others",
    RESTARTING: "between a failure and the next start",
    UNTOLD: "not told",
}
"""What time is shared out to, and what that means."""
IN_STEPS = ("computing", "data", "optimizer", "waiting", "other")
BUSY = (Activity.COMPUTING, Activity.DATA, Activity.OPTIMIZER)
"""A rank's own part of a step."""


_TOGETHER_S = 0.5


@dataclass
class Start:
    """One start of the job."""

    start_id: str
    began: float
    ended: float
    first_step: int = 0
    """The step it went on from."""
    last_step: int = 0
    samples: list[Sample] = field(default_factory=list)
    rank_ends: dict[int, float] = field(default_factory=dict)
    born: float = float("inf")
    """When its first rank was started, as ranks tell."""
    gap_s: float = 0.0
    """Between the end of the start before and this one, where the same agents made it."""

    @property
    def last(self) -> Sample | None:
        """What all ranks told last."""
        return self.samples[-1] if self.samples else None


def starts_of(run: Run) -> list[Start]:
    """The starts in order."""
    starts = {str(e.get("start_id")): Start(str(e.get("start_id")), e["time"], e["time"])
              for e in run.events if e.get("event") == "start"}  # fmt: skip
    for sample in run.samples:
        start = starts.setdefault(sample.start_id, Start(sample.start_id, sample.time, sample.time))
        _add_sample(start, sample)
        start.ended = max(start.ended, sample.time)
    for start in starts.values():
        if start.samples and not _is_event(run, start.start_id):  # without an agent: ranks tell how old they are
            start.began = min(start.began, start.born)
    ordered = sorted(starts.values(), key=lambda start: start.began)
    _add_events(run, ordered)
    for start in ordered:
        last = start.last
        start.last_step = max((told.step for told in last.ranks.values()), default=0) if last else 0
    return ordered


def _add_sample(start: Start, sample: Sample) -> None:
    """Without an agent each rank writes rows of its own: what the others told before still holds."""
    for rank, told in sample.ranks.items():
        start.born = min(start.born, sample.time - sum(told.seconds))
        if told.code is not None:
            start.rank_ends.setdefault(rank, sample.time)
    if start.samples:
        before = start.samples[-1]
        sample = Sample(sample.time, sample.start_id, {**before.ranks, **sample.ranks})
        if sample.time - before.time < _TOGETHER_S:
            start.samples.pop()
    start.samples.append(sample)


def _is_event(run: Run, start_id: str) -> bool:
    return any(e.get("event") == "start" and str(e.get("start_id")) == start_id for e in run.events)


def _add_events(run: Run, ordered: list[Start]) -> None:
    """When ranks and starts ended, from which step they went on, and how long it took until the next."""
    for index, start in enumerate(ordered):
        until = ordered[index + 1].began if index + 1 < len(ordered) else float("inf")
        start.first_step = _saved_before(run, start.began) if index else 0  # unless an event says so
        inside = [event for event in run.events if start.began <= event["time"] < until]
        for event in inside:
            what, rank, step = event.get("event"), event.get("rank"), number(event.get("step"))
            if what == "rank ended" and isinstance(rank, int):
                start.rank_ends[rank] = event["time"]
            if what == "resumed" and step is not None:
                start.first_step = int(step)
            if what in ("rank ended", "verdict", "restart", "port taken"):
                start.ended = max(start.ended, event["time"])
        goes_on = any(event.get("event") in ("restart", "port taken") for event in inside)
        if goes_on and index + 1 < len(ordered):
            ordered[index + 1].gap_s = max(0.0, until - start.ended)


def _saved_before(run: Run, moment: float) -> int:
    """The step of the newest checkpoint at that time."""
    saved = [number(e.get("step")) or 0 for e in run.events if e.get("event") == "saved" and e["time"] <= moment]
    return int(saved[-1]) if saved else 0


@dataclass
class Ledger:
    """Seconds by category, for each rank; each rank's add up to `wall_s`."""

    wall_s: float
    ranks: dict[int, dict[str, float]]
    nodes: dict[int, int]
    """Host of each rank, by node rank."""
    lost_steps: int = 0
    excess: float = 0.0
    """By what part of the wall time a rank told more than there was, at most."""

    @property
    def mean(self) -> dict[str, float]:
        """Of all ranks."""
        count = max(1, len(self.ranks))
        return {name: sum(rank.get(name, 0.0) for rank in self.ranks.values()) / count for name in CATEGORIES}

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps that count."""
        return sum(self.mean[name] for name in IN_STEPS) / self.wall_s if self.wall_s else 0.0


def ledger_of(starts: list[Start]) -> Ledger:
    """All starts' time, shared out."""
    ledger = Ledger(sum(start.ended - start.began + start.gap_s for start in starts), {}, {})
    names = [activity.words for activity in Activity]
    last = [start.last.ranks for start in starts if start.last]
    everyone = sorted({rank for ranks in last for rank, told in ranks.items() if told.seconds})
    for rank in everyone:
        ledger.ranks[rank] = dict.fromkeys(CATEGORIES, 0.0)
    for index, start in enumerate(starts):
        following = starts[index + 1] if index + 1 < len(starts) else None
        lost = max(0, start.last_step - following.first_step) if following else 0
        made = max(1, start.last_step - start.first_step)
        ledger.lost_steps += lost
        for rank in everyone:
            told = start.last.ranks.get(rank) if start.last else None
            seconds = dict(zip(names, told.seconds, strict=False)) if told else {}
            account = ledger.ranks[rank]
            wall_s = start.ended - start.began
            gone_s = max(0.0, start.ended - start.rank_ends.get(rank, start.ended)) if told else 0.0
            told_s, room_s = sum(seconds.values()), max(0.0, wall_s - gone_s)
            scale = room_s / told_s if told_s > room_s else 1.0  # a rank's clock and agent 0's may be a little apart
            ledger.excess = max(ledger.excess, (told_s - room_s) / max(wall_s, 1e-9)) if told else ledger.excess
            for name, value in seconds.items():
                share = min(1.0, lost / made) if name in IN_STEPS else 0.0
                account[name] += value * scale * (1 - share)
                account[LOST] += value * scale * share
            account[GONE] += gone_s
            account[RESTARTING] += start.gap_s
            account[UNTOLD] += wall_s - gone_s - told_s * scale
            if told:
                ledger.nodes[rank] = told.node
    return ledger
