"""A run folder as it is found: whatever is missing, cut short or damaged is told, and the rest is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.seam import LIVE_FILE, TIMES_FILE, Activity

Json = dict[str, Any]
MOST_BYTES = 8 << 20
"""Of a longer file only every so-manieth line is looked at."""
MOST_HOSTS = 100_000
_LONGEST_TEXT = 20_000
_SANE = 1e100


@dataclass(frozen=True)
class RankTimes:
    """What one rank had told at one moment."""

    rank: int
    node: int
    step: int
    seconds: tuple[float, ...]
    """In each `Activity` since its start; empty where it tells none."""
    phase: int = 0
    saved_step: int = -1
    code: int | None = None
    memory_mb: int = 0
    step_ms: float = 0.0


@dataclass(frozen=True)
class Sample:
    """All ranks at one moment of one start."""

    time: float
    start_id: str
    ranks: dict[int, RankTimes]


@dataclass
class Run:
    """One run folder."""

    path: Path
    name: str
    problems: list[str] = field(default_factory=list)
    metrics: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    plan: Json = field(default_factory=dict)
    environment: Json = field(default_factory=dict)
    verdict: Json = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    config: str = ""

    @property
    def hosts(self) -> list[str]:
        """Names by node rank: as the agents call themselves, else as planned."""
        planned = [host for host in _list(self.plan.get("hosts")) if isinstance(host, dict)]
        names = {index: str(host.get("name", f"node{index}")) for index, host in enumerate(planned)}
        for event in self.events:
            node = event.get("node_rank")
            if (
                event.get("event") == "joined"
                and isinstance(node, int)
                and 0 <= node < MOST_HOSTS
                and event.get("host")
            ):
                names[node] = str(event["host"])
        for index, name in enumerate(_list(self.environment.get("hosts"))):
            names.setdefault(index, str(name))
        return [names.get(index, f"node{index}") for index in range(max(names, default=-1) + 1)]

    def host(self, node: int) -> str:
        """A host's name by its node rank."""
        return self.hosts[node] if 0 <= node < len(self.hosts) else f"node{node}"

    @property
    def world_size(self) -> int:
        """How many ranks it had last; 0: unknown."""
        found = [self.plan.get("world_size"), self.environment.get("world_size")]
        told = max((len(sample.ranks) for sample in self.samples), default=0)
        return next((size for size in found if isinstance(size, int) and size > 0), told)


def read_run(path: Path, *, is_whole: bool = True) -> Run:
    """A run folder, or what is left of one. Never raises.

    Args:
        path: of the folder.
        is_whole: with what grows long: metrics and times.
    """
    run = Run(path, path.name or str(path))
    if is_whole:
        run.metrics = [
            row for row in _rows(run, "metrics.jsonl", is_thinned=True) if number(row.get("step")) is not None
        ]
        run.samples = _samples(run)
    run.events = [row for row in _rows(run, "events.jsonl") if number(row.get("time")) is not None]
    run.events.sort(key=lambda row: float(row["time"]))
    has_agent = any(row.get("event") == "start" for row in run.events)
    needed = {"plan": has_agent, "environment": bool(run.metrics)}
    for name in ("plan", "environment", "verdict", "summary"):
        setattr(run, name, _object(run, f"{name}.json", needed=needed.get(name, False)))
    run.config = (_text(run, "config.yaml", needed=False) or "")[:_LONGEST_TEXT]
    if not any((run.metrics, run.events, run.plan, run.environment, run.verdict, run.config)):
        run.problems.insert(0, f"nothing of a run was found in {path}")
    return run


def _samples(run: Run) -> list[Sample]:
    """An agent's, or those that ranks without one have written each for itself."""
    files = [TIMES_FILE, *sorted(f"times/{file.name}" for file in _listed(run.path / "times", "rank*.jsonl"))]
    rows = [row for name in files for row in _rows(run, name, needed=False, is_thinned=True)]
    found = (sample_of(row) for row in rows)
    return sorted((sample for sample in found if sample is not None), key=lambda sample: sample.time)


def read_live(path: Path) -> tuple[Sample | None, Json]:
    """What agent 0 told last, and all else that `live.json` holds."""
    told = _object(Run(path, path.name), LIVE_FILE, needed=False)
    return sample_of(told), told


def sample_of(row: Json) -> Sample | None:
    """A row of `times.jsonl`; None where it is none."""
    try:
        ranks = [_rank_of(told) for told in row["ranks"]]
        return Sample(_sane(row["time"]), str(row["start_id"]), {each.rank: each for each in ranks})
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def _rank_of(told: list[Any]) -> RankTimes:
    rank, node, step, phase, saved_step, code, memory_mb, step_ms, times_ms = told
    seconds = [_sane(time_ms) / 1000 for time_ms in times_ms][: len(Activity)]
    if min(int(rank), int(node), int(step), *seconds) < 0 or int(node) > MOST_HOSTS:
        raise ValueError("not such a rank")
    padded = tuple(seconds + [0.0] * (len(Activity) - len(seconds))) if seconds else ()
    ends = None if code is None else int(code)
    return RankTimes(
        int(rank), int(node), int(step), padded, int(phase), int(saved_step), ends, int(memory_mb), _sane(step_ms)
    )


def number(value: Any) -> float | None:
    """A finite number that can be reckoned with; None for all else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -_SANE < value < _SANE else None


def _sane(value: Any) -> float:
    found = number(value)
    if found is None:
        raise ValueError("no number")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _rows(run: Run, name: str, *, needed: bool = True, is_thinned: bool = False) -> list[Json]:
    """The objects in a file of JSON lines; lines that are none are counted."""
    path, found, bad = run.path / name, [], 0
    try:
        every = path.stat().st_size // MOST_BYTES + 1 if is_thinned else 1
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file if every == 1 else _thinned(file, every):
                if line.strip():
                    row = _parsed(line)
                    bad += not isinstance(row, dict)
                    found += [row] if isinstance(row, dict) else []
    except FileNotFoundError:
        run.problems += [f"{name} is missing"] if needed else []
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
    if bad:
        lines = f"{bad} line{'s' * (bad > 1)}"
        run.problems.append(f"{name}: {lines} cannot be read (cut short or damaged), the rest is used")
    elif needed and not found and path.is_file():
        run.problems.append(f"{name} is empty")
    return found


def _thinned(lines: Iterable[str], every: int) -> Iterator[str]:
    """Every so-manieth line, and the last one of each start: that one says how it ended."""
    before, start = "", ""
    for index, line in enumerate(lines):
        now = line[:200].partition('"start_id": "')[2][:12]
        if before and (now != start or index % every == 0):
            yield before
        before, start = line, now
    if before:
        yield before


def _object(run: Run, name: str, *, needed: bool) -> Json:
    text = _text(run, name, needed=needed)
    if text is None:
        return {}
    found = _parsed(text)
    if not isinstance(found, dict):
        run.problems.append(f"{name} cannot be read (cut short or damaged)")
        return {}
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(run: Run, name: str, *, needed: bool) -> str | None:
    try:
        return (run.path / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.problems += [f"{name} is missing"] if needed else []
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror}")
    return None
