"""`python -m train report RUN…`: one page of a run, or of several beside each other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.report.page import page_of, page_of_several
from train.report.read import read_run
from train.seam import RUNS_DIR, Exit

EPILOG = """examples:
  python -m train report my-run                 writes runs/my-run/report.html
  python -m train report first second third     curves in one picture: runs/compared.html
  python -m train report my-run --output -      to standard output

The page needs no network and no other file: send it, print it, open it on a phone. Every run gets one at its end; make
it again after `fab collect`, or while a run goes on. What is missing or damaged in the folder is said on the page.
Exit status: 0; 2 where there is no such run, or the page cannot be written."""

FILE = "report.html"


def main(argv: Sequence[str]) -> int:
    """Make the page that the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train report",
        description="A run folder as one HTML page: how it ended and why, curves, where the time went on each rank, "
        "who was slow, how long it took to start, events.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's name, or its folder")
    parser.add_argument("--output", metavar="FILE", help="where to (default: report.html in the run's folder)")
    parser.add_argument("--runs-dir", "--runs_dir", default=os.environ.get(RUNS_DIR) or "runs", help="(default: runs)")
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as end:
        return Exit.FINISHED if end.code == 0 else Exit.USAGE
    runs_dir = Path(options.runs_dir)
    found = [(name, _folder(name, runs_dir)) for name in options.runs]
    missing = [name for name, path in found if path is None]
    if missing:
        for name in missing:
            print(f"there is no run {name!r} in {runs_dir.absolute()}, and no such folder", file=sys.stderr)
        return Exit.USAGE
    paths = [path for _, path in found if path is not None]
    try:
        return _write(paths, options.output, runs_dir)
    except OSError as error:
        print(f"cannot write {error.filename or options.output}: {error.strerror}", file=sys.stderr)
        return Exit.USAGE


def make_report(path: Path) -> Path:
    """A run's page, in its own folder; it replaces the one before. Raises OSError."""
    return _replace(path / FILE, page_of(read_run(path)))


def _write(paths: Sequence[Path], output: str | None, runs_dir: Path) -> int:
    one = len(paths) == 1
    text = page_of(read_run(paths[0])) if one else page_of_several([read_run(path) for path in paths])
    if output == "-":
        sys.stdout.write(text)
        return Exit.FINISHED
    target = Path(output) if output else paths[0] / FILE if one else runs_dir / "compared.html"
    print(_replace(target, text))
    return Exit.FINISHED


def _folder(name: str, runs_dir: Path) -> Path | None:
    """A folder, even one in which nothing is left: the page says so."""
    return next((path for path in (runs_dir / name, Path(name)) if path.is_dir()), None)


def _replace(path: Path, text: str) -> Path:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path
