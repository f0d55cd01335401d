"""`python -m train pitfalls`: the usual mistakes of distributed training, each done wrong and right on real ranks.

A lesson is a file beside this one. Torch is loaded in the ranks alone: to list and to show lessons takes no time.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from train.checks.pitfalls.promises import LESSONS
from train.checks.pitfalls.trial import Result, try_out
from train.seam import Exit

_FOLDER = Path(__file__).parent
_EPILOG = """examples:
  python -m train pitfalls                                   the list
  python -m train pitfalls padded_evaluation                 both halves of one, on this machine
  python -m train pitfalls padded_evaluation --show          its file, which is the lesson
  python -m train pitfalls all

Each lesson has a wrong and a right half of the same shape, which run on two real ranks under Muster's agent. What is
measured is compared with what was promised, as worked out on paper. A wrong half that hangs is ended by the agent.
Exit code: 0 the wrong half failed as promised and the right one passed, 2 usage, 5 anything else."""


def main(argv: Sequence[str]) -> int:
    """List, show or run lessons; an exit code."""
    options = _parse(argv)
    if options.name is None:
        print(listing())
        return Exit.FINISHED
    if options.name not in (*LESSONS, "all"):
        near = difflib.get_close_matches(options.name, LESSONS, 1)
        hint = f": did you mean {near[0]}?" if near else ": `python -m train pitfalls` lists them"
        print(f"no pitfall {options.name!r}{hint}", file=sys.stderr)
        return Exit.USAGE
    names = list(LESSONS) if options.name == "all" else [options.name]
    if options.show:
        print("\n\n".join((_FOLDER / f"{name}.py").read_text(encoding="utf-8").rstrip() for name in names))
        return Exit.FINISHED
    return _run(names)


def listing() -> str:
    """A line for each: the mistake, and what it costs."""
    width = max(map(len, LESSONS))
    rows = (f"  {name:{width}}  {lesson.mistake}: {lesson.costs}" for name, lesson in LESSONS.items())
    return "\n".join(
        ["pitfalls: each runs wrong and right on two real ranks: python -m train pitfalls NAME, or all", *rows]
    )


def in_words(name: str, results: dict[str, Result]) -> str:
    """Both halves of a lesson: what was promised, what happened, whether that is the same."""
    lesson = LESSONS[name]
    lines = [f"{name}: {lesson.mistake}", f"  costs: {lesson.costs}", f"  measured: {lesson.figure}"]
    for which, result in results.items():
        lines += ["", f"  {which}: {'as promised' if result.is_as_promised else 'NOT as promised'}"]
        lines += [f"    promised  {result.promised}", f"    happened  {result.happened}"]
        lines += [f"              {line}" for line in result.said]
    lines += [
        "",
        f"  in Muster: {lesson.here[0]}: {lesson.here[1]}",
        f"  to read: python -m train pitfalls {name} --show",
    ]
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train pitfalls",
        description="See the usual mistakes of distributed training happen, and what is right beside them.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one, or all; without: the list")
    parser.add_argument("--show", action="store_true", help="print the lesson's file instead of running it")
    return parser.parse_args(argv)


def _run(names: Sequence[str]) -> int:
    fine = 0
    try:
        for name, results in try_out(names):
            print(in_words(name, results), end="\n\n", flush=True)
            fine += all(result.is_as_promised for result in results.values())
    except KeyboardInterrupt:
        return Exit.STOPPED_UNSAVED
    print(f"pitfalls: {fine} of {len(names)} went wrong and right as promised")
    return Exit.FINISHED if fine == len(names) else Exit.RANK_FAILED
