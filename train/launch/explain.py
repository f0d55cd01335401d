"""`python -m train explain RUN|FILE…`: a run's verdict again, and what known failures left in logs, ours or not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.launch.log_scan import Located, Scan
from train.seam import RUNS_DIR, Exit, find_run

EPILOG = """examples:
  python -m train explain demo                 the run folder runs/demo
  python -m train explain slurm-1234.out       any log, of anything that trains
  python -m train explain node1.log node2.log
  kubectl logs job/train | python -m train explain -

Of several failures the one named first is the most probable cause: the others often follow from it.
Exit status: 0, also where nothing known was found (--json tells); 2 where a run or file cannot be read."""

_LONGEST_SHOWN = 400
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Explained:
    """What is known of one run, or of some logs."""

    scan: Scan
    run: str | None = None
    verdict: Mapping[str, Any] | None = None
    rank: int | None = None
    """The verdict's."""


def main(argv: Sequence[str]) -> int:
    """Explain what is named on the command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train explain",
        description="Say again why a run ended, or find out from any log: the cause, where it stands, what to do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "what", nargs="+", metavar="RUN|FILE", help="a run's name or folder, a log file, or - for stdin"
    )
    parser.add_argument("--runs-dir", "--runs_dir", default=os.environ.get(RUNS_DIR) or "runs", help="(default: runs)")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as end:
        return Exit.FINISHED if end.code == 0 else Exit.USAGE
    problems: list[str] = []
    explained = [explain_run(run, problems) for run in _runs(options.what, Path(options.runs_dir))]
    files = [name for name in options.what if _run(name, Path(options.runs_dir)) is None]
    if files:
        explained.append(Explained(_scanned(files, Path(options.runs_dir), problems)))
    if options.json:
        print(json.dumps([as_dict(one) for one in explained], indent=1))
    else:
        words = [in_words(one) for one in explained if one.scan.counts or one.run or not problems]
        print("\n\n".join(words), end="\n" if words else "")
    for problem in problems:
        print(problem, file=sys.stderr)
    return Exit.USAGE if problems else Exit.FINISHED


def explain_run(folder: Path, problems: list[str]) -> Explained:
    """A run's verdict, and unless it ended well what its logs tell."""
    verdict: Mapping[str, Any] | None = None
    path = folder / "verdict.json"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problems.append(f"cannot read {path}: {error}")
    if not isinstance(verdict, dict):
        verdict = None
    scan = Scan()
    if verdict is None or verdict.get("outcome") == "failed":
        for log in sorted(folder.glob("logs/*/rank*.log")):
            _read(scan, str(log), problems)
    rank = verdict.get("rank") if verdict else None
    return Explained(scan, folder.name, verdict, rank)


def in_words(explained: Explained) -> str:
    """For people."""
    lines = _verdict_words(explained.run, explained.verdict) if explained.run else []
    found = explained.scan.findings(explained.rank)
    if not found:
        if not explained.run:
            lines.append(
                "nothing known was found; the first error or traceback of the rank that ended first tells most"
            )
        return "\n".join(lines)
    first, more = found[0], found[1:]
    if lines:
        lines += ["", "its logs say:"]
    lines += [
        f"{'most probable cause' if more else 'cause'}: {_prefixed(first)}{first.finding.cause}",
        f"what to do: {first.finding.advice}",
        f"where: {first.file}, line {first.number}",
        f"  {_shown(first.finding.line)}",
    ]
    behind = explained.scan.behind()
    if behind:
        lines.append(f"NCCL's reports: {behind}")
    if more:
        lines += ["", "found too, and perhaps because of it:"]
        lines += [_in_one_line(at, explained.scan.counts[at]) for at in more[:_MOST_SHOWN]]
        if len(more) > _MOST_SHOWN:
            lines.append(f"  and {len(more) - _MOST_SHOWN} more (--json has all)")
    return "\n".join(lines)


def as_dict(explained: Explained) -> dict[str, Any]:
    """For programs."""
    findings = [
        {
            "name": at.finding.signature.name, "kind": at.finding.kind, "cause": at.finding.cause,
            "advice": at.finding.advice, "file": at.file, "line_number": at.number, "line": at.finding.line,
            "rank": at.rank, "host": at.host, "count": explained.scan.counts[at],
        }
        for at in explained.scan.findings(explained.rank)
    ]  # fmt: skip
    return {
        "run": explained.run, "verdict": explained.verdict, "findings": findings, "behind": explained.scan.behind(),
    }  # fmt: skip


def _verdict_words(run: str, verdict: Mapping[str, Any] | None) -> list[str]:
    if verdict is None:
        return [f"run {run} has no verdict: it still runs, or all that could have written one was killed"]
    step = f" at step {verdict['step']}" if verdict.get("step") is not None else ""
    cause, outcome = verdict.get("cause"), verdict.get("outcome")
    head = f"run {run} {outcome}{'' if cause else step} (exit code {verdict.get('exit_code')})"
    lines = [f"{head}: {cause}" if cause else head]
    if verdict.get("advice"):
        lines.append(f"what to do: {verdict['advice']}")
    if verdict.get("evidence"):
        lines += ["evidence:", *(f"  {_shown(str(line))}" for line in verdict["evidence"])]
    return lines


def _runs(names: Sequence[str], runs_dir: Path) -> list[Path]:
    return [run for name in names if (run := _run(name, runs_dir)) is not None]


def _run(name: str, runs_dir: Path) -> Path | None:
    return None if name == "-" or Path(name).is_file() else find_run(name, runs_dir)


def _scanned(names: Sequence[str], runs_dir: Path, problems: list[str]) -> Scan:
    scan = Scan()
    for name in names:
        path = Path(name)
        if name != "-" and not path.exists():
            problems.append(f"there is no run {name!r} in {runs_dir.absolute()}, and no such file")
        elif path.is_dir():
            problems.append(f"{name} is a folder, but not that of a run: name the logs in it")
        else:
            _read(scan, name, problems)
    return scan


def _read(scan: Scan, name: str, problems: list[str]) -> None:
    try:
        if name == "-":
            scan.read(sys.stdin.buffer, "(standard input)")
        else:
            with Path(name).open("rb") as stream:
                scan.read(stream, name)
    except OSError as error:
        problems.append(f"cannot read {name}: {error.strerror or error}")


def _prefixed(at: Located) -> str:
    return f"{at.who}: " if at.who else ""


def _in_one_line(at: Located, count: int) -> str:
    times = f" ({count} times)" if count > 1 else ""
    return f"  {at.file}:{at.number}: {_prefixed(at)}{at.finding.cause}{times}"


def _shown(line: str) -> str:
    """A line as it may be shown: no control characters, and not too long."""
    text = "".join(char if char.isprintable() else " " for char in line.expandtabs())
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + " ..."
