"""`python -m train stop RUN`: asks a running job to save and stop, by the file STOP in its run folder."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from train.seam import RUNS_DIR, STOP_FILE, Exit, find_run

POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Ask, and wait for the end; 0 where the job has ended in good order, else its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train stop",
        description="Ask a running job to save a checkpoint and stop, all ranks at the same step; the same command "
        "goes on from there later. Works on any host of the job: an agent looks for the request each second.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's name, or the path of its folder")
    parser.add_argument("--runs-dir", default=os.environ.get(RUNS_DIR) or "runs", help="where run folders are (runs)")
    parser.add_argument("--no-wait", action="store_true", help="only ask")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="wait so long for the end (600)")
    options = parser.parse_args(argv)
    folder = find_run(options.run, Path(options.runs_dir))
    if folder is None:
        return _refuse(f"no run {options.run!r} in {Path(options.runs_dir).absolute()}: give its name or its folder")
    if not is_running(folder):
        return _refuse(f"no job is running in {folder} as far as this host can see: nothing to stop")
    if not any(folder.glob(".agent*.lock")):
        return _refuse(f"run {folder.name} was started without an agent, which would look for the request: "
                       "send SIGTERM to its launcher or to one of its ranks")  # fmt: skip
    try:
        (folder / STOP_FILE).touch()
    except OSError as error:
        return _refuse(f"cannot write {folder / STOP_FILE}: {error.strerror}")
    print(f"asked run {folder.name} to stop", flush=True)
    if options.no_wait:
        return Exit.FINISHED
    print("waiting for its end (Ctrl-C: no longer wait; the request stands)", flush=True)
    try:
        return _wait(folder, options.timeout_s)
    except KeyboardInterrupt:
        return Exit.FINISHED


def is_running(folder: Path) -> bool:
    """Whether an agent, or a rank 0, holds the folder: its lock is let go by the kernel when it ends, however."""
    return any(_is_held(lock) for lock in [folder / ".lock", *folder.glob(".agent*.lock")])


def _is_held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _wait(folder: Path, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while is_running(folder):
        if time.monotonic() > deadline:
            return _refuse(f"run {folder.name} has not ended within {timeout_s:g} s: see its log")
        time.sleep(POLL_S)
    try:
        verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _refuse(f"run {folder.name} has ended without a verdict: see its logs")
    print(verdict["cause"] or verdict["outcome"])
    code = int(verdict["exit_code"])
    return Exit.FINISHED if code == Exit.STOPPED_SAVED else code


def _refuse(words: str) -> int:
    print(words, file=sys.stderr)
    return Exit.USAGE
