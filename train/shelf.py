"""`python -m train checkpoints ls|verify|export RUN`: what a run has saved, whether it is whole, its weights alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.errors import CheckpointError, UsageError
from train.seam import RUNS_DIR, Exit, find_run

_EPILOG = """examples:
  python -m train checkpoints ls my-run
  python -m train checkpoints verify my-run
  python -m train checkpoints export my-run --output weights.safetensors
  python -m train checkpoints export my-run --step 400

Exit code: 0, 2 where there is no such run or checkpoint, 3 where one is damaged
or cannot be read. Nothing in the run's folder is changed, and the run may go on meanwhile."""


def main(argv: Sequence[str]) -> int:
    """Do it; an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train checkpoints",
        description="List or verify the checkpoints of a run, or export the weights of one as safetensors.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("action", choices=("ls", "verify", "export"))
    parser.add_argument("run", metavar="RUN", help="a run's name, or the path of its folder")
    parser.add_argument("--runs-dir", default=os.environ.get(RUNS_DIR) or "runs", help="where run folders are (runs)")
    parser.add_argument("--step", type=int, help="export that step's (default: the newest whole one)")
    parser.add_argument("--output", metavar="FILE", help="export to it (default: RUN-step-N.safetensors, here)")
    options = parser.parse_args(argv)
    try:
        folder = folder_of(options.run, options.runs_dir)
        if options.action == "export":
            return _export(folder, options.step, options.output)
        return _ls(folder) if options.action == "ls" else _verify(folder)
    except UsageError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return Exit.USAGE
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return Exit.PREFLIGHT


def folder_of(run: str, runs_dir: str) -> Path:
    """A run's folder, given by name or path. Raises UsageError."""
    folder = find_run(run, Path(runs_dir))
    if folder is None:
        raise UsageError(f"no run {run!r} in {Path(runs_dir).absolute()}: give its name or its folder")
    return folder


def chosen(folder: Path, step: int | None) -> tuple[dict[str, Any], Path]:
    """The state of a step, or of the newest whole checkpoint, and its folder. Raises UsageError, CheckpointError."""
    from train.checkpoint import Checkpoints, load, step_of

    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    if step is None:
        newest = checkpoints.newest()
        if newest is None:
            raise UsageError(f"run {folder.name} has no checkpoint yet")
        state, path, damaged = newest
        for words in damaged:
            print(f"{words}; taking {path.name} instead", file=sys.stderr)
        return state, path
    there = {step_of(path): path for path in checkpoints.saved()}
    if step not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise UsageError(f"--step {step}: run {folder.name} has no checkpoint of it; there are: {steps}")
    return load(there[step]), there[step]


def _ls(folder: Path) -> int:
    from train.checkpoint import Checkpoints, name_of, step_of

    try:
        newest = (folder / "checkpoints" / "latest").read_text(errors="replace").strip()
    except OSError:
        newest = ""
    print(f"{'step':>10}  {'MB':>9}  saved")
    for path in reversed(list(Checkpoints(folder / "checkpoints", keep=1).saved())):
        mark = "  latest" if name_of(step_of(path)) == newest else ""
        facts = _facts(path, mark)
        if facts:
            print(f"{step_of(path):>10}  {facts}")
    return Exit.FINISHED


def _facts(path: Path, mark: str) -> str:
    """A checkpoint's size, time and what it plainly lacks; nothing where a job at work has removed it just now."""
    from train.disk import in_words, is_gone

    try:
        saved = time.strftime("%F %T", time.localtime(path.stat().st_mtime))
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        lacks = "" if (path / "manifest.json").exists() else "  no manifest: damaged"
    except OSError as error:
        return "" if is_gone(path) else f"{'?':>9}  {in_words(error)}"
    return f"{size / 1e6:>9,.1f}  {saved}{mark}{lacks}"


def _verify(folder: Path) -> int:
    from train.checkpoint import Checkpoints, name_of, step_of, verify
    from train.disk import is_gone

    code = Exit.FINISHED
    found = list(Checkpoints(folder / "checkpoints", keep=1).saved())
    if not found:
        raise UsageError(f"run {folder.name} has no checkpoint yet")
    for path in reversed(found):
        try:
            verify(path)
            print(f"{name_of(step_of(path))}: whole")
        except CheckpointError as error:
            if is_gone(path):  # a job at work has removed it
                continue
            print(f"{name_of(step_of(path))}: {error}")
            code = Exit.PREFLIGHT
    return code


def _export(folder: Path, step: int | None, output: str | None) -> int:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from train.checkpoint import name_of, step_of

    state, path = chosen(folder, step)
    target = Path(output or f"{folder.name}-{name_of(step_of(path))}.safetensors")
    weights = {name: tensor.clone().contiguous() for name, tensor in state["model"].items()}  # tied ones are two here
    about = {"config": json.dumps(state["config"]), "step": str(state["progress"]["step"]), "format": "pt"}
    try:
        save_file(weights, target, metadata=about)  # written aside and renamed, by itself
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--output: cannot write {target}: {error}") from None
    print(f"{target}: {len(weights)} tensors, {sum(t.nbytes for t in weights.values()) / 1e6:,.1f} MB")
    return Exit.FINISHED
