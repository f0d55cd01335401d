"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from train import checkpoint
from train.checkpoint import Checkpoints, State
from train.errors import MusterError, UsageError
from train.options import LaunchOptions
from train.progress import log
from train.run_folder import RunFolder, refuse_other_config
from train.saver import Saver
from train.sharing import share
from train.state import Job, restore


def resume(job: Job, options: LaunchOptions, folder: RunFolder | None) -> None:
    """Go on from a checkpoint, if there is one and it is wanted: rank 0 reads it, the others get it from there.

    Raises UsageError on all ranks where it is damaged, of another config or other data, or further than `steps`.
    """
    found: State | None = None
    problem = ""
    if folder is not None:
        keep = job.config.train.keep_checkpoints, job.config.train.keep_every
        parameters = dict(job.objective.model.named_parameters())
        with_moments = 3 * sum(parameter.nbytes for parameter in parameters.values())  # AdamW has two a weight
        checkpoints = Checkpoints(folder.path / "checkpoints", *keep)
        job.saver = Saver(checkpoints, [*parameters], partial(_note, job, folder), with_moments)
        try:
            found = _find_state(job, options, folder, job.saver.checkpoints)
        except (MusterError, OSError) as error:
            problem = str(error)
    problem = job.runtime.broadcast(problem)
    if problem:
        raise UsageError(f"--resume {options.resume}: {problem}".splitlines())
    state = share(found, job.runtime)
    if state is not None:
        try:
            restore(job, state)
        except (RuntimeError, ValueError) as error:  # of an allowed difference that weights or moments cannot bear
            raise UsageError(f"--resume {options.resume}: the state does not fit this config: {error}") from None
        log.info(f"going on from step {job.progress.step} of {job.steps}")
        if folder is not None:
            folder.record("resumed", step=job.progress.step)


def _note(job: Job, folder: RunFolder, event: str, **facts: Any) -> None:
    """A save has ended: the events tell, and so does this rank to its agent."""
    folder.record(event, **facts)
    if event == "saved":
        job.health.saved(facts["step"])


def _find_state(job: Job, options: LaunchOptions, folder: RunFolder, checkpoints: Checkpoints) -> State | None:
    """The state to go on from. A run's own checkpoints come first: the same command always goes on."""
    has_own = any(checkpoints.saved())
    if options.resume == "none":
        if has_own:
            raise UsageError(f"run {folder.run_id} has checkpoints: give another --run-id, or remove {folder.path}")
        return None
    if options.resume == "auto" or has_own:
        newest = checkpoints.newest()
        if newest is None:
            return None
        state, name = _named(newest), f"run {folder.run_id}"
    else:
        state, name = _given_state(Path(options.resume)), options.resume
    refuse_other_config(state["config"], job.config, name, options.resume_allow)
    if state["data"] != job.data.fingerprint and not _allows_other_data(options.resume_allow):
        raise UsageError(
            f"{name} was trained on other data ({state['data']}, now {job.data.fingerprint}): give it the same "
            "files, start anew (--resume none), or go on all the same (--resume.allow data)"
        )
    if state["progress"]["step"] > job.steps:
        raise UsageError(
            f"{name} has done {state['progress']['step']} steps, but this config ends after {job.steps}: raise "
            "train.steps, or start anew (--resume none)"
        )
    return state


def _allows_other_data(allowed: Sequence[str]) -> bool:
    return any(name == "data" or name.startswith("data.") for name in allowed)


def _given_state(given: Path) -> State:
    if (given / "checkpoints").is_dir():
        given = given / "checkpoints"
    if (given / "manifest.json").exists() or (given / "state.pt").exists():
        return checkpoint.load(given)
    newest = Checkpoints(given, keep=1).newest()
    if newest is None:
        raise UsageError(f"{given} is neither a checkpoint nor a run folder that holds one (nor the word auto or none)")
    return _named(newest)


def _named(newest: tuple[State, Path, list[str]]) -> State:
    """The state; what had to be passed over is named."""
    state, path, damaged = newest
    for words in damaged:
        log.warning(f"{words}; taking {path.name} instead")
    return state
