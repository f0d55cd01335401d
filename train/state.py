"""The parts of one rank, how far it is, and what of that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from train.checkpoint import State
from train.config import Config
from train.data import Batches, Data, Order
from train.deadline import SAVE, Deadline
from train.health import Health
from train.metrics import Metrics, SampleLog
from train.models import Objective
from train.precision import Precision
from train.progress import StepLine
from train.runtime import Runtime
from train.saver import Saver, refuse_non_finite
from train.seam import Activity, Phase
from train.strategies import Strategy
from train.times import TimesLog
from train.timing import Timing


@dataclass(frozen=True)
class Evaluation:
    """Means over a whole set."""

    loss: float
    accuracy: float | None
    """Share of targets named right; None where targets are not classes."""
    samples: int


@dataclass
class Progress:
    """How far a run is: all that its state is besides weights and optimizer."""

    step: int = 0
    updates: int = 0
    """Steps that changed weights; fewer than `step` where a scaler skipped some."""
    saved_step: int = 0
    """The newest step there is a checkpoint of."""
    best_eval_loss: float = math.inf
    evaluated_step: int = 0
    """The newest step after which it was evaluated: a stop may have come between the step and its evaluation."""
    evaluation: Evaluation | None = None
    items: float = 0.0
    seconds: float = 0.0
    """Time in steps of this start, without evaluation and saving; with `items`, the mean speed."""


@dataclass
class Job:
    """The parts of one rank, wired."""

    config: Config
    steps: int
    runtime: Runtime
    data: Data
    order: Order
    batches: Batches
    objective: Objective
    strategy: Strategy
    precision: Precision
    optimizer: torch.optim.Optimizer
    line: StepLine
    asked_to_stop: Callable[[], bool]
    saver: Saver | None = None
    """Only rank 0 writes checkpoints."""
    metrics: Metrics | None = None
    """Only rank 0 keeps them."""
    samples: SampleLog | None = None
    """Where it is asked for."""
    times: TimesLog | None = None
    """Where no agent writes down what ranks tell."""
    progress: Progress = field(default_factory=Progress)
    health: Health = field(default_factory=Health)
    """What this rank is doing, and its word to the node agent."""
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    """Of rank 0; the others never meet one."""

    def evaluates_after(self, step: int) -> bool:
        """Whether a step is to be followed by an evaluation: the last one always."""
        return step == self.steps or _every(self.config.train.eval_every, step)

    def saves_after(self, step: int) -> bool:
        """Whether a step is to be saved."""
        return step == self.steps or _every(self.config.train.save_every, step)

    def is_through(self) -> bool:
        """Whether the last step is done, and evaluated."""
        return self.progress.step == self.progress.evaluated_step == self.steps

    @cached_property
    def timing(self) -> Timing:
        """Where the time of steps goes."""
        is_plain = self.runtime.world_size > 1 and not self.config.model.compile
        return Timing(self.health, self.runtime.device, self.strategy if is_plain else None)

    def end_step(self) -> None:
        """A step is done; after the first one, the time-out of every step counts."""
        self.timing.doing(Activity.OTHER)
        self.health.beat(self.progress.step)
        if self.times is not None:
            self.times.look(self.progress.step)
        if self.health.phase is not Phase.STEP:
            self.runtime.end_first_step()
            self.health.enter(Phase.STEP, self.progress.step)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def state_of(job: Job) -> State:
    """All that is needed to go on: what a checkpoint holds."""
    return {
        "model": job.objective.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scaler": job.precision.state(),
        "progress": {
            "step": job.progress.step,
            "updates": job.progress.updates,
            "saved_step": job.progress.step,
            "best_eval_loss": job.progress.best_eval_loss,
            "evaluated_step": job.progress.evaluated_step,
        },
        "data": job.data.fingerprint,
        "config": job.config.as_dict(),
    }


def restore(job: Job, state: State) -> None:
    """Take up a checkpoint's state: strict, on every rank."""
    job.objective.model.load_state_dict(state["model"])
    asked = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    job.optimizer.load_state_dict(state["optimizer"])
    for group, now in zip(job.optimizer.param_groups, asked, strict=True):
        group.update(now)  # the moments are the checkpoint's, the settings those of today's config
    job.precision.load(state["scaler"])
    job.progress = Progress(**state["progress"])
    job.health.beat(job.progress.step)
    job.health.saved(job.progress.saved_step)


def save(job: Job, *, wait: bool = True) -> None:
    """Write a checkpoint; see `_save`, which is timed here."""
    with job.deadline.aside(SAVE):
        _save(job, wait=wait)


def _save(job: Job, *, wait: bool) -> None:
    """Write a checkpoint on rank 0. A failed one is a warning: training goes on.

    Args:
        job: all ranks'.
        wait: until it is on the disk, or known not to be, on all ranks alike. Else rank 0 alone stands still, while it
            copies the state, and the others go on to where they need it again.

    Raises:
        NonFiniteError: weights are NaN; the last good checkpoint stays the newest.
        CheckpointError: the third save in a row has failed.
    """
    step, saver = job.progress.step, job.saver
    if not wait:
        if saver is not None:
            job.health.enter(Phase.SAVING, step)
            # The others wait in the next step meanwhile, and would call it a hang.
            saver.save(step, state_of(job), patience_s=job.config.runtime.step_timeout_s / 2)
            job.health.enter(Phase.STEP, step)
        return
    refuse_non_finite(step, dict(job.objective.model.named_parameters()))
    job.health.enter(Phase.SAVING, step)
    if job.runtime.broadcast(saver is None or (saver.save(step, state_of(job)) and saver.wait())):
        job.progress.saved_step = step
        job.health.saved(step)
    job.health.enter(Phase.STEP, step)
