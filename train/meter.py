"""What becomes of a step's numbers: rows, the progress line, or an error where a loss is no number."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from train.errors import NonFiniteError
from train.progress import log
from train.state import Evaluation, Job
from train.tally import Tally


@dataclass(frozen=True)
class Step:
    """A step whose numbers are still to be read."""

    tally: Tally
    lr: float
    norm: torch.Tensor | None
    """Gradient norm before clipping; None where it was not asked for."""
    ended_s: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108
    """When the host was done with it, on its own clock."""


class Meter:
    """Turns steps that are done into rows, the progress line, and errors where a loss is no number."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._row_items = self._row_seconds = 0.0
        self.started = time.time()
        self.restart()

    def restart(self) -> None:
        """Go on measuring from here: what was since the last step (an evaluation, a save) is no step's time."""
        self._mark = time.perf_counter()

    def note(self, done: Step) -> bool:
        """Take one step's totals; whether some rank was asked to stop. Raises NonFiniteError."""
        job, step = self._job, done.tally.step
        totals = done.tally.read()
        if not math.isfinite(totals.loss_sum):
            raise NonFiniteError(_blame(job, done.tally, totals.loss_sum))
        # On a GPU the host is ahead: a step has ended when its sums could be read.
        ended_s = time.perf_counter() if job.runtime.device.type == "cuda" else done.ended_s
        job.progress.items += totals.count
        job.progress.seconds += ended_s - self._mark
        self._row_items += totals.count
        self._row_seconds += ended_s - self._mark
        self._mark = ended_s
        speed = self._row_items / max(self._row_seconds, 1e-9)
        if step % job.config.train.log_every == 0 or step == job.steps:
            if job.metrics is not None:
                norm = math.nan if done.norm is None else float(done.norm)
                row = {"loss": totals.loss, "lr": done.lr, "grad_norm": norm, "items_per_s": speed}
                job.metrics.write(step, {"time_s": time.time() - self.started, **row})
            self._row_items = self._row_seconds = 0.0
        job.line.update(step, totals.loss, done.lr, speed)
        return totals.stops > 0

    def note_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation's row."""
        job = self._job
        job.progress.evaluated_step = job.progress.step
        job.progress.best_eval_loss = min(job.progress.best_eval_loss, evaluation.loss)
        log.info(f"step {job.progress.step}  validation loss {evaluation.loss:.4f}")
        if job.metrics is not None:
            row = {"time_s": time.time() - self.started, "eval_loss": evaluation.loss}
            if evaluation.accuracy is not None:
                row["eval_accuracy"] = evaluation.accuracy
            job.metrics.write(job.progress.step, row)


def _blame(job: Job, tally: Tally, total: float) -> str:
    """Which rank's loss is no number, and which samples it came from."""
    finite = bool(torch.isfinite(tally.local_loss_sum))
    ids = [] if finite else torch.cat([part for part, _ in job.batches.sampler.window(tally.step - 1)]).tolist()
    guilty = [
        f"rank {rank} ({host}), samples {', '.join(map(str, theirs[:12]))}{' …' if len(theirs) > 12 else ''}"
        for rank, (host, theirs) in enumerate(job.runtime.gather((job.runtime.host, ids)))
        if theirs
    ]
    return (
        f"the loss is {total} at step {tally.step} on {'; '.join(guilty) or 'the sum over ranks'} of global batch "
        f"{tally.step - 1}: look at these samples, lower optim.lr, or lengthen optim.warmup_steps; "
        "the last checkpoint is from before and good"
    )
