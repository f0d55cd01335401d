"""The page of one run, and the page that lays several beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from train import __version__
from train.report.curves import curves, points_of, restart_marks
from train.report.ledger import CATEGORIES, Ledger, ledger_of, starts_of
from train.report.read import Json, Run, number
from train.report.straggle import heat_of, median
from train.report.style import css, kind_of, patterns
from train.report.svg import Bar, bar_chart, bar_legend, shown
from train.report.times import getting_going, where_it_went, who_is_slow
from train.report.words import ago, details, duration, figure, section, table, text
from train.seam import Exit

_MOST_EVENTS = 300
_MOST_ROWS = 1024
MEANING = {
    Exit.FINISHED: "finished",
    Exit.BUG: "a bug of Muster's own",
    Exit.USAGE: "bad config or usage",
    Exit.PREFLIGHT: "a host was not fit",
    Exit.NEVER_JOINED: "a host or rank never joined",
    Exit.RANK_FAILED: "a rank failed",
    Exit.HANG: "a hang",
    Exit.HOST_LOST: "a host was lost",
    Exit.STOPPED_UNSAVED: "stopped, the last steps are lost",
    Exit.STOPPED_SAVED: "stopped and saved: the same command goes on",
}


def page_of(run: Run) -> str:
    """Everything of one run."""
    starts = starts_of(run)
    ledger = ledger_of(starts)
    drawn = curves([run], restart_marks(starts))
    body = [
        f"<h1>{text(run.name)}</h1>",
        verdict(run),
        problems(run),
        tiles(run, ledger, len(starts)),
        section("Curves", '<div class="grid">', *drawn, "</div>")
        if drawn
        else section("Curves", '<p class="none">No metrics were written.</p>'),
        where_it_went(run, ledger),
        section(
            "Who was slow, and how it got going",
            '<div class="grid">',
            who_is_slow(run, heat_of(starts), ledger.nodes),
            getting_going(run, starts),
            "</div>",
        ),
        events(run),
        facts(run),
    ]
    return _document(f"{run.name}: report", body)


def page_of_several(runs: Sequence[Run]) -> str:
    """Outcomes in a table, curves in one picture, shares of time."""
    ledgers = [ledger_of(starts_of(run)) for run in runs]
    head = ["run", "outcome", "steps", "loss", "validation loss", "items a second", "ranks", "wall time", "in steps"]
    rows = [
        (
            text(run.name), text(_outcome(run)), str(_steps(run) or "–"), _last(run, "loss"), _last(run, "eval_loss"),
            _speed(run), str(run.world_size or "–"), duration(ledger.wall_s) if ledger.wall_s else "–",
            f"{100 * ledger.goodput:.1f} %" if ledger.ranks else "–",
        )
        for run, ledger in zip(runs, ledgers, strict=True)
    ]  # fmt: skip
    bars = [
        Bar(run.name, [(kind_of(name), 100 * part / ledger.wall_s) for name, part in ledger.mean.items()])
        for run, ledger in zip(runs, ledgers, strict=True)
        if ledger.ranks and ledger.wall_s
    ]
    used = [
        name
        for name in CATEGORIES
        if any(size > 0.05 for bar in bars for kind, size in bar.pieces if kind == kind_of(name))
    ]
    legend = bar_legend([(kind_of(name), CATEGORIES[name]) for name in used])
    body = [
        f"<h1>{text(', '.join(run.name for run in runs))}</h1>",
        *(problems(run, with_name=True) for run in runs),
        section("Outcomes", table(head, rows, range(2, 9))),
        section("Curves", '<div class="grid">', *curves(runs), "</div>"),
    ]
    if bars:
        shares = figure("Mean of each run's ranks", bar_chart(bars, "% of wall time", "shares of time") + legend)
        body.append(section("Where the time went", '<div class="grid">', shares, "</div>"))
    return _document("report of several runs", body)


def verdict(run: Run) -> str:
    """How it ended, in plain words."""
    told = run.verdict
    outcome = str(told.get("outcome") or "unknown")
    if not told:
        words = "No verdict: it still runs, or all that could have written one was killed."
        return f'<div class="verdict"><strong>{words}</strong></div>'
    code = told.get("exit_code")
    meaning = f" ({MEANING[Exit(code)]})" if isinstance(code, int) and code in set(Exit) else ""
    step = f" at step {told['step']}" if number(told.get("step")) is not None else ""
    cause = told.get("cause") or f"{outcome.capitalize()}{step}."
    lines = [f"<p><strong>{text(cause)}</strong></p>"]
    if told.get("advice"):
        lines.append(f"<p>What to do: {text(told['advice'])}</p>")
    lines.append(f'<p class="soft">{text(outcome)}{text(step)}, exit code {text(code)}{text(meaning)}</p>')
    evidence = told.get("evidence")
    if isinstance(evidence, list) and evidence:
        lines.append(details("evidence", f"<pre>{text(chr(10).join(map(str, evidence)))}</pre>"))
    kind = outcome if outcome in ("finished", "stopped", "failed") else "unknown"
    return f'<div class="verdict {kind}">{"".join(lines)}</div>'


def problems(run: Run, *, with_name: bool = False) -> str:
    """What of the folder could not be read."""
    before = f"{run.name}: " if with_name else ""
    said = "".join(f"<li>{text(before + words)}</li>" for words in run.problems)
    return f'<ul class="problems">{said}</ul>' if said else ""


def tiles(run: Run, ledger: Ledger, starts: int) -> str:
    """The few numbers that one looks for first."""
    hosts = len(run.hosts)
    found = [
        ("steps", str(_steps(run) or "–")),
        ("last training loss", _last(run, "loss")),
        ("last validation loss", _last(run, "eval_loss")),
        ("items a second", _speed(run)),
        ("wall time", duration(ledger.wall_s) if ledger.wall_s else "–"),
        ("of it in steps that count", f"{100 * ledger.goodput:.0f} %" if ledger.ranks else "–"),
        ("restarts", str(max(0, starts - 1)) if starts else "–"),
        ("ranks on hosts", f"{run.world_size or '–'} on {hosts or '–'}"),
    ]
    cells = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in found)
    return f'<div class="tiles">{cells}</div>'


def events(run: Run) -> str:
    """What happened when."""
    if not run.events:
        return section("Events", '<p class="none">None were written.</p>')
    first = run.events[0]["time"]
    shown_events = run.events
    if len(run.events) > _MOST_EVENTS:
        shown_events = [*run.events[: _MOST_EVENTS // 3], *run.events[-2 * _MOST_EVENTS // 3 :]]
    rows = [(ago(event["time"] - first), text(event.get("event", "")), _event_words(event)) for event in shown_events]
    left_out = len(run.events) - len(shown_events)
    more = f'<p class="soft">{left_out} in the middle are left out.</p>' if left_out else ""
    return section("Events", '<div class="events">', table(["when", "what", ""], rows, (0,)), "</div>", more)


def _event_words(event: Json) -> str:
    kept = {name: value for name, value in event.items() if name not in ("time", "t_s", "event") and value is not None}
    return text(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in kept.items()))


def facts(run: Run) -> str:
    """Who had which rank, on what, and the whole config."""
    parts = []
    hosts = run.plan.get("hosts")
    if isinstance(hosts, list) and hosts:
        rows = [
            (str(index), text(run.host(index)), text(host.get("address", "")), text(_ranges(host.get("ranks"))))
            for index, host in enumerate(hosts[:_MOST_ROWS])
            if isinstance(host, dict)
        ]
        parts.append(figure("Plan", table(["node rank", "host", "address", "ranks"], rows, (0,))))
    if run.environment:
        rows2 = [(text(name.replace("_", " ")), text(_joined(value))) for name, value in run.environment.items()]
        parts.append(figure("Environment", table(["", ""], rows2)))
    command = run.plan.get("command")
    said = details("command", f"<pre>{text(_joined(command, ' '))}</pre>") if command else ""
    config = details("config.yaml", f"<pre>{text(run.config)}</pre>") if run.config else ""
    return section("What ran where", '<div class="grid">', *parts, "</div>", said, config)


def _joined(value: object, by: str = ", ") -> str:
    return by.join(map(str, value)) if isinstance(value, list) else str(value)


def _ranges(ranks: object) -> str:
    if not isinstance(ranks, list) or not ranks:
        return ""
    is_row = all(isinstance(rank, int) for rank in ranks) and ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}–{ranks[-1]}" if is_row and len(ranks) > 2 else _joined(ranks)


def _outcome(run: Run) -> str:
    outcome, cause = run.verdict.get("outcome"), run.verdict.get("cause")
    return f"{outcome}: {cause}" if cause else str(outcome or "no verdict")


def _steps(run: Run) -> int:
    told = number(run.verdict.get("step"))
    sampled = (told.step for sample in run.samples[-1:] for told in sample.ranks.values())
    return int(max([told or 0, *(row["step"] for row in run.metrics[-1:]), *sampled]))


def _last(run: Run, key: str) -> str:
    points = points_of(run, key)
    return shown(points[-1][1]) if points else "–"


def _speed(run: Run) -> str:
    points = points_of(run, "items_per_s")
    return shown(median([value for _, value in points])) if points else "–"


def _document(title: str, body: Sequence[str]) -> str:
    made = f'<footer class="soft">Made by Muster {text(__version__)} from the run folder alone.</footer>'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{css()}</style></head>\n<body>{patterns()}\n"
        + "\n".join(part for part in body if part)
        + f"\n{made}</body></html>\n"
    )
