"""Sections about time: where it went, who was slow, how long it took to get going."""

from __future__ import annotations

from collections.abc import Sequence

from train.report.image import LEVELS, colour_of, data_uri, png
from train.report.ledger import CATEGORIES, IN_STEPS, Ledger, Start
from train.report.read import RankTimes, Run
from train.report.straggle import SLOW, Heat
from train.report.style import kind_of
from train.report.svg import WIDTH, Bar, bar_chart, bar_legend, swatch
from train.report.words import duration, figure, section, table, text
from train.seam import Activity

_MOST_BARS = 512
_MOST_HOSTS = 64
_UP = (Activity.LOADING, Activity.JOINING, Activity.PREPARING, Activity.FIRST_STEP)


def where_it_went(run: Run, ledger: Ledger) -> str:
    """The ledger: a table for all, a bar for each rank."""
    if not ledger.ranks:
        why = "its ranks told no times (a script of your own, or an older run)"
        return section("Where the time went", f'<p class="none">Nothing is known of that: {why}.</p>')
    mean, accounts = ledger.mean, ledger.ranks.values()
    used = [name for name in CATEGORIES if max(account[name] for account in accounts) >= 0.0005 * ledger.wall_s]
    bars = [
        Bar(_label(run, ledger, rank), [(kind_of(name), account[name]) for name in CATEGORIES])
        for rank, account in _fewer(ledger)
    ]
    said = "; ".join(f"{CATEGORIES[name]} {duration(mean[name])}" for name in used)
    chart = bar_chart(bars, "seconds", f"{len(accounts)} ranks, {duration(ledger.wall_s)} each; {said}")
    legend = bar_legend([(kind_of(name), CATEGORIES[name]) for name in used])
    every = "" if len(bars) == len(accounts) else f"{len(bars)} of {len(accounts)} ranks, evenly chosen."
    return section(
        "Where the time went",
        f"<p>{text(_in_words(ledger))}</p>",
        '<div class="grid">',
        figure("Mean of all ranks", _ledger_table(ledger, used)),
        figure("Each rank", chart + legend, every),
        "</div>",
    )


def _ledger_table(ledger: Ledger, used: Sequence[str]) -> str:
    """A line a category, and their sum: the wall time."""
    mean, accounts = ledger.mean, ledger.ranks.values()
    rows = [
        (
            f"{swatch(kind_of(name))} {text(CATEGORIES[name])}",
            duration(mean[name]),
            f"{100 * mean[name] / max(ledger.wall_s, 1e-9):.1f} %",
            f"{duration(min(a[name] for a in accounts))} – {duration(max(a[name] for a in accounts))}",
        )
        for name in used
    ]
    wall = f'<td class="n">{duration(ledger.wall_s)}</td><td class="n">100 %</td><td></td>'
    total = f'<tr class="sum"><td>wall time</td>{wall}</tr>'
    return table(["", "mean", "share", "of a rank"], rows, (1, 2, 3), total)


def _in_words(ledger: Ledger) -> str:
    """What the ledger comes to, and what is to be known of it."""
    mean, in_steps = ledger.mean, ", ".join(CATEGORIES[name] for name in IN_STEPS)
    words = [f"{100 * ledger.goodput:.1f} % of the wall time went into steps that count ({in_steps})."]
    if ledger.lost_steps:
        words.append(f"{ledger.lost_steps} steps were lost by restarts and done again.")
    if len(ledger.ranks) > 1 and mean["computing"] and not mean["waiting"]:
        what = "Waiting for other ranks is counted as forward and backward"
        words.append(f"{what}: on a GPU the host cannot tell them apart.")
    if ledger.excess > 0.02:
        words.append(f"Clocks disagree: a rank told {100 * ledger.excess:.1f} % more time than there was.")
    return " ".join(words)


def _label(run: Run, ledger: Ledger, rank: int) -> str:
    return f"{rank} {run.host(ledger.nodes.get(rank, 0))}" if len(ledger.ranks) <= 32 else str(rank)


def _fewer(ledger: Ledger) -> list[tuple[int, dict[str, float]]]:
    ranks = sorted(ledger.ranks.items())
    if len(ranks) <= _MOST_BARS:
        return ranks
    return [ranks[index * len(ranks) // _MOST_BARS] for index in range(_MOST_BARS)]


def who_is_slow(run: Run, heat: Heat, nodes: dict[int, int]) -> str:
    """The heat map, and in words what it shows."""
    if not heat.slots:
        return figure("Stragglers", '<p class="none">Too short a run, or no times told: nothing to compare.</p>')
    slow = sorted(((heat.mean(i), rank) for i, rank in enumerate(heat.ranks)), reverse=True)
    found = [
        f"Rank {rank} ({run.host(nodes.get(rank, 0))}) took {ratio:.1f} times as long as the median rank for its own "
        f"part of a step (data, computing, optimizer)."
        for ratio, rank in slow[:5]
        if ratio >= SLOW
    ]
    count = sum(ratio >= SLOW for ratio, _ in slow)
    if count > 5:
        found.append(f"{count - 5} more ranks were slow.")
    if len(heat.ranks) == 1:
        found = ["One rank alone: there is nobody to compare it with."]
    elif heat.is_blind:
        found = ["Its ranks could not tell waiting from computing (as on GPUs): what follows holds the waiting too."]
    words = " ".join(found) or f"No rank took more than {SLOW:g} times as long as the median rank for its own part."
    rows = [[colour_of(ratio) for ratio in row] for row in heat.ratios]
    height = max(40, min(640, len(rows) * (20 if len(rows) <= 16 else 3)))
    legend = "".join(f"<span>{swatch('', f'fill:rgb{colour_of(level)}')} {level:g} ×</span>" for level in LEVELS)
    chart = _heat_chart(run, heat, nodes, data_uri(png(rows)), height, words) + f'<p class="legend">{legend}</p>'
    caption = "Each rank's own time a step, in medians of all ranks at that time; dark is slow, grey did no step."
    return figure("Stragglers: ranks × time", f"<p>{text(words)}</p>{chart}", text(caption))


def _heat_chart(run: Run, heat: Heat, nodes: dict[int, int], image: str, height: int, words: str) -> str:
    few = len(heat.ranks) <= 32
    labels = [f"{rank} {run.host(nodes.get(rank, 0))}"[:24] if few else str(rank) for rank in heat.ranks]
    left = min(160.0, 12 + 6.2 * max(len(label) for label in labels))
    wide, pitch = WIDTH - left - 10, height / len(labels)
    every = max(1, -(-13 // pitch))
    parts = [
        f'<image x="{left:.1f}" y="4" width="{wide:.1f}" height="{height}" preserveAspectRatio="none" href="{image}"/>'
    ]
    for index, label in enumerate(labels):
        if index % every == 0:
            y = 4 + pitch * (index + 0.5) + 4
            parts.append(f'<text text-anchor="end" x="{left - 5:.1f}" y="{y:.1f}">{text(label)}</text>')
    for count, slot in enumerate(heat.restarts, 1):
        x = left + wide * slot / len(heat.slots)
        parts.append(f'<path class="mark" d="M{x:.1f} 0V{height + 8}"/>')
        parts.append(f'<text class="marked" text-anchor="middle" x="{x:.1f}" y="{height + 34}">restart {count}</text>')
    begin = heat.slots[0][0]
    for part, anchor in ((0, "start"), (len(heat.slots) - 1, "end")):
        x, at = (left, heat.slots[0][0]) if part == 0 else (WIDTH - 10, heat.slots[-1][1])
        parts.append(f'<text text-anchor="{anchor}" x="{x:.1f}" y="{height + 20}">{duration(at - begin)}</text>')
    label = f"{len(labels)} ranks over {duration(heat.slots[-1][1] - begin)}. {words}"
    box = f"0 0 {WIDTH} {height + 40}"
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def getting_going(run: Run, starts: list[Start]) -> str:
    """From the first agent to the first step, a bar for each host and start."""
    bars = [
        bar for number, start in enumerate(starts[:4]) for bar in _bars_of_start(run, start, number, len(starts) > 1)
    ]
    if not bars:
        return figure("Getting going", '<p class="none">Nothing is known of that.</p>')
    kinds = [("k-connect", "until its agent is here"), ("k-hosts", "until all hosts are here")]
    kinds += [(kind_of(activity.words), CATEGORIES[activity.words]) for activity in _UP]
    seen = {kind for bar in bars for kind, size in bar.pieces if size > 0}
    longest = max(sum(size for _, size in bar.pieces) for bar in bars)
    words = f"{duration(longest)} from the first agent to the end of the first step, on the slowest host."
    chart = bar_chart(bars, "seconds", words) + bar_legend([kind for kind in kinds if kind[0] in seen])
    return figure("Getting going: each host", f"<p>{text(words)}</p>{chart}")


def _bars_of_start(run: Run, start: Start, number: int, several: bool) -> list[Bar]:
    joined = {e["node_rank"]: e["time"] for e in run.events
              if e.get("event") == "joined" and isinstance(e.get("node_rank"), int) and e["time"] <= start.began
              and start.began - e["time"] < 3600}  # fmt: skip
    first = start.began if number or not joined else min(joined.values())
    slowest: dict[int, RankTimes] = {}
    for told in start.last.ranks.values() if start.last else ():
        if told.seconds and (told.node not in slowest or _up_s(told) > _up_s(slowest[told.node])):
            slowest[told.node] = told
    chosen = sorted(slowest)
    if len(chosen) > _MOST_HOSTS:
        chosen = sorted(sorted(chosen, key=lambda node: -_up_s(slowest[node]))[:_MOST_HOSTS])
    bars = []
    for node in chosen:
        here = max(0.0, min(joined.get(node, start.began), start.began) - first)
        pieces = [("k-connect", here), ("k-hosts", max(0.0, start.began - first - here))]
        pieces += [(kind_of(activity.words), slowest[node].seconds[activity]) for activity in _UP]
        bars.append(Bar(f"{run.host(node)}{f', start {number + 1}' if several else ''}", pieces))
    return bars


def _up_s(told: RankTimes) -> float:
    return sum(told.seconds[activity] for activity in _UP)
