"""`python -m train watch RUN`: hosts and ranks as they go, from the run folder on this host. Nothing is written."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from train.report.ledger import starts_of
from train.report.read import Json, RankTimes, Sample, number, read_live, read_run
from train.report.straggle import SLOW, median, own_ms
from train.report.words import duration, plain
from train.seam import RUNS_DIR, Activity, Exit, Phase, find_run

EPILOG = """examples:
  python -m train watch my-run              until it ends; Ctrl-C leaves it alone
  python -m train watch my-run --once       one look, for scripts

Each line is a rank, or a host where there are many: its step and phase, how long a step takes, what of it is its own
(data, computing, optimizer) and what waiting for others, its memory. On other hosts than agent 0's, where no disk is
shared, there is nothing to see: watch there, as in `ssh host1 python -m train watch my-run`.
Exit status: 0; 2 where there is no such run."""

EVERY_S = 1.0
_SILENT_S = 5.0
_MOST_RANKS = 32
_WINDOW_S = 10.0
_EVENTS = 6


class Watcher:
    """What has been seen of a run, and a picture of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        run = read_run(path)
        self._hosts = run.hosts
        self._seen: deque[Sample] = deque([s for start in starts_of(run)[-1:] for s in start.samples[-60:]], maxlen=120)
        self._steps = _steps_of(run.config)
        self.verdict: Json = {}

    def look(self, now: float) -> Group:
        """A picture of how it is by now, the wall clock's."""
        run = read_run(self._path, is_whole=False)
        self._hosts, self.verdict = run.hosts, run.verdict
        live, told = read_live(self._path)
        if live is None:  # without an agent the ranks write themselves
            live = next((start.last for start in starts_of(read_run(self._path))[-1:]), None)
        if live is not None and (not self._seen or live.time > self._seen[-1].time):
            self._seen.append(live)
        parts: list[Any] = [self._head(live, told, now)]
        if live is not None:
            parts.append(self._table(live, told))
        parts += self._words(live)
        parts += [
            Text(_event(event), style="dim", overflow="ellipsis", no_wrap=True) for event in run.events[-_EVENTS:]
        ]
        return Group(*parts)

    def _head(self, live: Sample | None, told: Json, now: float) -> Text:
        name, verdict = self._path.name, self.verdict
        if verdict:
            cause = verdict.get("cause") or f"{verdict.get('outcome')} at step {verdict.get('step')}"
            code = verdict.get("exit_code")
            return Text(
                f"{name}: {plain(cause)} (exit code {plain(code)})", style="bold green" if code == 0 else "bold red"
            )
        if live is None:
            return Text(f"{name}: its ranks have told nothing yet", style="bold")
        step = min((each.step for each in live.ranks.values()), default=0)
        of = f" of {self._steps}" if self._steps else ""
        restarts = number(told.get("restarts")) or 0
        words = f"{name}: step {step}{of}" + (f", restart {restarts:.0f}" if restarts else "")
        silent_s = now - live.time
        if silent_s > _SILENT_S:
            return Text(
                f"{words}, nothing heard for {duration(silent_s)}: its agent 0 is gone, or frozen", style="bold red"
            )
        return Text(words, style="bold")

    def _table(self, live: Sample, told: Json) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("host", "rank", "step", "phase", "a step", "own", "waits", "memory", "saved"):
            table.add_column(name, justify="left" if name in ("host", "rank", "phase") else "right")
        own = self.own(live)
        usual = median([each for each in own.values() if each is not None])
        ranks = sorted(live.ranks.values(), key=lambda each: each.rank)
        for group in [[each] for each in ranks] if len(ranks) <= _MOST_RANKS else _by_host(ranks):
            last = max(group, key=lambda each: (own[each.rank] or 0.0, -each.step))
            slow = bool(usual) and (own[last.rank] or 0.0) >= SLOW * usual
            table.add_row(*self._row(group, last, own[last.rank], told), style="bold yellow" if slow else None)
        return table

    def _row(self, group: Sequence[RankTimes], last: RankTimes, own: float | None, told: Json) -> list[str]:
        """One rank, or the ranks of a host, of whom the slowest is shown."""
        first = group[0]
        name = plain(self._hosts[first.node], 30) if first.node < len(self._hosts) else f"node{first.node}"
        ranks = str(first.rank) if len(group) == 1 else f"{first.rank}–{group[-1].rank}, slowest {last.rank}"
        waits = self._rate(last, (Activity.WAITING,))
        return [
            name, ranks, str(min(each.step for each in group)), _phase(last, told),
            f"{last.step_ms:.0f} ms" if last.step_ms else "–",
            f"{own:.0f} ms" if own is not None else "–",
            f"{waits:.0f} ms" if waits is not None else "–",
            f"{max(each.memory_mb for each in group)} MB" if any(each.memory_mb for each in group) else "–",
            str(max(each.saved_step for each in group)) if any(each.saved_step >= 0 for each in group) else "–",
        ]  # fmt: skip

    def own(self, live: Sample) -> dict[int, float | None]:
        """Each rank's own milliseconds a step, over the last seconds."""
        early = self._earlier(live)
        return {rank: own_ms(early.ranks.get(rank), told) for rank, told in live.ranks.items()}

    def _earlier(self, live: Sample) -> Sample:
        """Some seconds before, when fewer steps were done: an evaluation may have come since."""
        behind = [
            sample
            for sample in self._seen
            if sample.start_id == live.start_id and sample.time < live.time and _steps(sample) < _steps(live)
        ]
        old = [sample for sample in behind if live.time - sample.time >= _WINDOW_S]
        return old[-1] if old else behind[0] if behind else live

    def _rate(self, told: RankTimes, activities: Sequence[Activity]) -> float | None:
        if not self._seen:
            return None
        before = self._earlier(self._seen[-1]).ranks.get(told.rank)
        if before is None or told.step <= before.step or not before.seconds or not told.seconds:
            return None
        return 1000 * sum(told.seconds[a] - before.seconds[a] for a in activities) / (told.step - before.step)

    def _words(self, live: Sample | None) -> list[Text]:
        """Who holds up the others."""
        own = self.own(live) if live is not None else {}
        usual = median([each for each in own.values() if each is not None])
        slow = [(ms / usual, rank) for rank, ms in own.items() if ms is not None and usual and ms >= SLOW * usual]
        return [
            Text(
                f"rank {rank} holds up the others: {ratio:.1f} times the median rank's own part of a step",
                style="yellow",
            )
            for ratio, rank in sorted(slow, reverse=True)[:3]
        ]


def main(argv: Sequence[str]) -> int:
    """Watch what the command line names; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train watch",
        description="Hosts and ranks of a run as they go: step, phase, step time, memory, who is slow, events.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's name, or its folder")
    parser.add_argument("--once", action="store_true", help="print how it is now, and leave")
    parser.add_argument("--runs-dir", "--runs_dir", default=os.environ.get(RUNS_DIR) or "runs", help="(default: runs)")
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as end:
        return Exit.FINISHED if end.code == 0 else Exit.USAGE
    path = find_run(options.run, Path(options.runs_dir))
    if path is None:
        print(f"there is no run {options.run!r} in {Path(options.runs_dir).absolute()}", file=sys.stderr)
        return Exit.USAGE
    console, watcher = Console(highlight=False), Watcher(path)
    try:
        if options.once or not console.is_terminal:
            console.print(watcher.look(time.time()))
        else:
            _follow(watcher, console)
    except KeyboardInterrupt:
        pass  # whoever watches may leave; the run goes on
    return Exit.FINISHED


def _follow(watcher: Watcher, console: Console) -> None:
    with Live(watcher.look(time.time()), console=console, auto_refresh=False) as live:
        while not watcher.verdict:
            time.sleep(EVERY_S)
            live.update(watcher.look(time.time()), refresh=True)


def _steps(sample: Sample) -> int:
    return min((told.step for told in sample.ranks.values()), default=0)


def _by_host(ranks: Sequence[RankTimes]) -> list[list[RankTimes]]:
    hosts: dict[int, list[RankTimes]] = {}
    for each in ranks:
        hosts.setdefault(each.node, []).append(each)
    return [hosts[node] for node in sorted(hosts)]


def _phase(rank: RankTimes, told: Json) -> str:
    hosts = told.get("hosts")
    about = hosts[rank.node] if isinstance(hosts, list) and rank.node < len(hosts) else None
    if isinstance(about, list) and len(about) == 3 and about[1]:
        return "host lost"
    if rank.code is not None:
        return f"ended ({rank.code})"
    return Phase(rank.phase).words if rank.phase in set(Phase) else "?"


def _event(event: Json) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(min(max(float(event["time"]), 0.0), 4e9)))
    facts = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "t_s", "event") and v is not None)
    return plain(f"{clock}  {event.get('event')}  {facts}", 300).replace("\n", " ")


def _steps_of(config: str) -> int | None:
    """How many steps the config asks for, where it says so in steps."""
    try:
        train = yaml.safe_load(config)["train"]
        return int(train["steps"]) if train.get("epochs") is None else None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return None
