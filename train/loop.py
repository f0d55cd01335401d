"""The loop: `fit` trains, `evaluate` measures. Everything else is somewhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from train.checkpoint import Checkpoints, State
from train.config import Config
from train.data import Batches, Data, Order, evaluation_batches
from train.errors import CheckpointError, NonFiniteError
from train.metrics import Metrics
from train.models import Objective, count_correct
from train.optim import learning_rate, scale_and_clip
from train.precision import Precision
from train.progress import StepLine, log
from train.replicas import check_replicas
from train.runtime import Runtime
from train.strategies import Strategy
from train.tally import Tally


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
    best_eval_loss: float = math.inf
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
    checkpoints: Checkpoints
    metrics: Metrics | None
    """None but on rank 0."""
    line: StepLine
    asked_to_stop: Callable[[], bool]
    progress: Progress = field(default_factory=Progress)


def fit(job: Job) -> bool:
    """Train to the last step, or to the step at which all ranks agree to stop; whether it came to the end."""
    config, runtime, strategy, precision, progress = job.config, job.runtime, job.strategy, job.precision, job.progress
    parameters = [p for p in job.objective.parameters() if p.requires_grad]
    pending: _Step | None = None
    stopping = False
    meter = _Meter(job)

    for window in job.batches.windows(progress.step, job.steps):
        step = progress.step + 1
        runtime.reseed(config.train.seed, step)
        lr = learning_rate(config.optim, progress.updates, job.steps)
        for group in job.optimizer.param_groups:
            group["lr"] = lr

        # The true count of items is known only once all ranks have told theirs, while the last backward runs.
        # So backward divides by the usual one, and the gradients are put right afterwards.
        usual_count = len(job.order.batch(step - 1)) * job.data.spec.items_per_sample
        loss_sum = count = torch.zeros((), device=runtime.device)
        for number, micro in enumerate(window, 1):
            is_last = number == len(window)
            with nullcontext() if is_last else strategy.hold_gradients():
                with precision.autocast():
                    micro_sum, micro_count = strategy.forward(precision.cast(micro.tensors))
                if micro.is_padding:
                    micro_sum, micro_count = micro_sum * 0.0, micro_count * 0
                loss_sum, count = loss_sum + micro_sum.detach(), count + micro_count
                if is_last:
                    tally = Tally(runtime, step, loss_sum, count, job.asked_to_stop())
                precision.backward(micro_sum * (strategy.loss_scale / usual_count))
        strategy.reduce_gradients()

        precision.unscale(job.optimizer)
        is_logged = step % config.train.log_every == 0 or step == job.steps
        gradients = [p.grad for p in parameters if p.grad is not None]
        correction = usual_count / tally.count().clamp(min=1)
        norm = scale_and_clip(gradients, correction, config.optim.clip_norm, measure=is_logged)
        progress.updates += precision.step(job.optimizer)
        job.optimizer.zero_grad()
        strategy.sync_buffers()
        progress.step = step

        # What the last step's tally says is read now: the host never waits for the step it has just queued.
        this = _Step(tally, lr, norm if is_logged else None)
        for done in (pending,) if pending else ():
            stopping = meter.note(done)
        pending = this
        is_last_step = stopping or step == job.steps
        evaluates = is_last_step or _every(config.train.eval_every, step)
        saves = is_last_step or _every(config.train.save_every, step)
        if evaluates or saves:
            stopping = meter.note(pending) or stopping
            pending = None
        if is_last_step or _every(config.train.check_replicas_every, step):
            check_replicas(job.objective.model, runtime, step)
        if saves:
            save(job)
        if evaluates and not stopping:
            progress.evaluation = evaluate(job)
            meter.note_evaluation(progress.evaluation)
        if evaluates or saves:
            meter.restart()
        if is_last_step:
            return step == job.steps
    return True


def evaluate(job: Job) -> Evaluation:
    """Mean loss over the validation set, each sample once, shared out over all ranks.

    The bare model runs, without the strategy's wrapper: a rank with fewer samples, or none, keeps nobody waiting.
    """
    config, runtime = job.config, job.runtime
    micro_size = config.batch.micro_size or max(1, config.batch.global_size // runtime.world_size)
    sums = torch.zeros(4, dtype=torch.float64, device=runtime.device)
    has_classes = True
    job.objective.eval()
    with torch.no_grad():
        for batch in evaluation_batches(job.data.val, runtime.rank, runtime.world_size, micro_size, runtime.device):
            batch = job.precision.cast(batch)
            with job.precision.autocast():
                loss_sum, count, output = job.objective.measure(*batch)
            correct = count_correct(output, batch[-1])
            has_classes = correct is not None
            sums += torch.stack([
                loss_sum.double(), count.double(), torch.as_tensor(correct or 0, device=sums.device).double(),
                torch.tensor(len(batch[-1]), device=sums.device).double(),
            ])  # fmt: skip
    job.objective.train()
    loss_sum, count, correct, samples = runtime.sum(sums, "evaluation").tolist()
    assert samples == len(job.data.val), f"evaluated {samples} samples of {len(job.data.val)}"
    return Evaluation(loss_sum / max(1.0, count), correct / max(1.0, count) if has_classes else None, int(samples))


def state_of(job: Job) -> State:
    """All that is needed to go on: what a checkpoint holds."""
    return {
        "model": job.objective.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scaler": job.precision.state(),
        "progress": {
            "step": job.progress.step,
            "updates": job.progress.updates,
            "best_eval_loss": job.progress.best_eval_loss,
        },
        "random": {"seed": job.config.train.seed, "rule": "reseeded before each step from (seed, step, rank)"},
        "config": job.config.as_dict(),
    }


def restore(job: Job, state: State) -> None:
    """Take up a checkpoint's state: strict, on every rank."""
    job.objective.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.precision.load(state["scaler"])
    job.progress = Progress(**state["progress"])


def save(job: Job) -> None:
    """Write a checkpoint on rank 0, while the others wait. A failed one is a warning: training goes on.

    Raises NonFiniteError rather than write weights that are NaN: the last good checkpoint stays the newest.
    """
    bad = next((n for n, p in job.objective.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        raise NonFiniteError(f"{bad} is not finite after step {job.progress.step}: not saved")
    problem = None
    if job.runtime.rank == 0:
        try:
            job.checkpoints.save(job.progress.step, state_of(job))
        except CheckpointError as error:
            problem = str(error)
            log.warning(f"{problem}; training goes on, older checkpoints stay")
    job.runtime.broadcast(problem)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


@dataclass(frozen=True)
class _Step:
    tally: Tally
    lr: float
    norm: torch.Tensor | None


class _Meter:
    """Turns steps that are done into rows, the progress line, and errors where a loss is no number."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._row_items = 0.0
        self._last_loss = math.nan
        self.started = time.time()
        self.restart()

    def restart(self) -> None:
        """Start measuring speed anew, so that evaluation and saving do not count."""
        self._since = time.perf_counter()
        self._row_items = 0.0

    def note(self, done: _Step) -> bool:
        """Take one step's totals; whether some rank was asked to stop. Raises NonFiniteError."""
        job, step = self._job, done.tally.step
        totals = done.tally.read()
        if not math.isfinite(totals.loss_sum):
            raise NonFiniteError(_blame(job, done.tally, totals.loss_sum))
        job.progress.items += totals.count
        self._row_items += totals.count
        elapsed = time.perf_counter() - self._since
        speed = self._row_items / elapsed
        if step % job.config.train.log_every == 0 or step == job.steps:
            job.progress.seconds += elapsed
            if job.metrics is not None:
                norm = math.nan if done.norm is None else float(done.norm)
                row = {"loss": totals.loss, "lr": done.lr, "grad_norm": norm, "items_per_s": speed}
                job.metrics.write(step, {"time_s": time.time() - self.started, **row})
            self.restart()
        job.line.update(step, totals.loss, done.lr, speed)
        return totals.stops > 0

    def note_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation's row."""
        job = self._job
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
