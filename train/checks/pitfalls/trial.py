"""Runs lessons under the node agent on this machine, and compares what happened with what was promised."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.checks.pitfalls.promises import LESSONS, RANKS, Lesson, is_as_promised
from train.seam import RUN_ID, RUNS_DIR, STATUS_PAGE

HALF_S = 20.0
"""A half that comes to its end may take so long without a sign of life."""
HANG_S = 5.0
"""A half that is to hang: it is asked after so long. Everything is loaded and connected before."""
_AGENT_S = 180.0
_EVIDENCE = 4


@dataclass(frozen=True)
class Result:
    """What came of one half."""

    is_as_promised: bool
    promised: str
    happened: str
    said: tuple[str, ...]
    """What the lesson itself tells of it."""
    took_s: float
    figure: float | None = None
    """None: it did not come to its end."""
    exit_code: int = 0
    """The agent's."""
    verdict: str = ""
    """The agent's words, where it did not come to its end."""


def try_out(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Result]]]:
    """Each lesson with its halves, `wrong` and `right`. Those that come to their end share one start of ranks."""
    folder = Path(tempfile.mkdtemp(prefix="pitfalls-"))
    try:
        ending = [f"{name}:wrong" for name in names if not LESSONS[name].hangs] + [f"{name}:right" for name in names]
        shared = Start(folder, "shared", ending, HALF_S)
        for name in names:
            lesson = LESSONS[name]
            wrong = (
                _stuck(lesson, Start(folder, name, [f"{name}:wrong"], HANG_S))
                if isinstance(lesson.wrong, str)
                else _measured(lesson.wrong, lesson, shared, f"{name}:wrong")
            )
            yield name, {"wrong": wrong, "right": _measured(lesson.right, lesson, shared, f"{name}:right")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Start:
    """One start of ranks under an agent, through to its end."""

    def __init__(self, folder: Path, run_id: str, halves: Sequence[str], patience_s: float) -> None:
        """
        Args:
            folder: for run folders and results.
            run_id: names the run folder.
            halves: `name:wrong` or `name:right`, in the order in which they are run.
            patience_s: without a sign of life for so long, a half is judged to hang.
        """
        results = folder / f"{run_id}.jsonl"
        command = [
            sys.executable, "-m", "train", "node", "--standalone", "--nproc-per-node", str(RANKS),
            "--runs-dir", str(folder), "--run-id", run_id,
            "--", sys.executable, "-m", "train.checks.pitfalls.ranks", str(results), str(patience_s), *halves,
        ]  # fmt: skip
        began_s = time.time()
        output = folder / f"{run_id}.out"
        self.exit_code = _wait(command, output)
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        self.rows: list[dict[str, Any]] = [row for row in rows if "figure" in row]
        """One for each rank that came to the end of a half."""
        self.took_s = time.time() - max((row["began_s"] for row in rows if "began_s" in row), default=began_s)
        """From the last half's begin to the agent's end: that of a half that hangs."""
        verdict = _read(folder / run_id / "verdict.json")
        self.cause = str(verdict.get("cause") or f"the agent ended with {self.exit_code}: {_last_line(output)}")
        self.evidence = tuple(map(str, verdict.get("evidence", ())))


def _wait(command: Sequence[str], output: Path) -> int:
    """The agent's exit code."""
    ours = {name: value for name, value in os.environ.items() if name not in (RUN_ID, RUNS_DIR, STATUS_PAGE)}
    with output.open("wb") as file:
        agent = subprocess.Popen(  # noqa: S603 - an argument list
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=ours
        )
        try:
            return agent.wait(_AGENT_S)
        finally:
            if agent.poll() is None:
                agent.terminate()
                agent.wait()


def _measured(promised: float, lesson: Lesson, start: Start, half: str) -> Result:
    """A half that was to come to its end with a figure: rank 0's counts, and its lines are shown."""
    words = f"{promised:.6g} ({lesson.why})"
    row = next((row for row in start.rows if row["half"] == half and row["rank"] == 0), None)
    if row is None:
        happened = f"it did not come to its end: {start.cause}"
        return Result(False, words, happened, start.evidence, start.took_s, None, start.exit_code, start.cause)
    fine = is_as_promised(row["figure"], promised)
    return Result(fine, words, f"{row['figure']:.6g}", tuple(row["said"]), row["took_s"], row["figure"])


def _stuck(lesson: Lesson, start: Start) -> Result:
    """A half that was never to come to its end on all ranks."""
    through = [line for row in start.rows for line in row["said"]]
    fine = start.exit_code in lesson.ends_with and len(start.rows) < RANKS
    codes = " or ".join(f"{code.value} ({code.name.lower().replace('_', ' ')})" for code in lesson.ends_with)
    words = f"it never ends, for {lesson.wrong}; the agent ends it with exit code {codes}"
    happened = f"exit code {start.exit_code}, {start.took_s:.1f} s after it began: {start.cause}"
    said = (*through, *start.evidence[:_EVIDENCE])
    return Result(fine, words, happened, said, start.took_s, None, start.exit_code, start.cause)


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
