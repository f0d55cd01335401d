"""The loop: `fit` trains, `evaluate` measures. Everything else is somewhere else."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch

from train.data import evaluation_batches
from train.deadline import CHECK, EVALUATION
from train.meter import Meter, Step
from train.models import count_correct
from train.optim import learning_rate, scale_and_clip
from train.replicas import check_replicas
from train.seam import Activity, Phase
from train.state import Evaluation, Job, save
from train.tally import Tally


def fit(job: Job) -> bool:  # noqa: PLR0912, PLR0915
    """Train to the last step, or to the step at which all ranks agree to stop; whether it came to the end."""
    config, runtime, strategy, precision, progress = job.config, job.runtime, job.strategy, job.precision, job.progress
    parameters = [p for p in job.objective.parameters() if p.requires_grad]
    nothing = torch.zeros((), device=runtime.device), torch.zeros((), dtype=torch.int64, device=runtime.device)
    first = progress.step + 1
    pending: Step | None = None
    stopping = False
    meter = Meter(job)
    _make_up(job, meter)
    job.health.enter(Phase.FIRST_STEP, progress.step)

    for window in job.timing.of_data(job.batches.windows(progress.step, job.steps)):
        step = progress.step + 1
        if step == first:
            strategy.settle(precision.cast(window[0].tensors))
        runtime.reseed(config.train.seed, step)
        lr = learning_rate(config.optim, progress.updates, job.steps)
        for group in job.optimizer.param_groups:
            group["lr"] = lr

        # The true count of items is known only once all ranks have told theirs, while the last backward runs.
        # So backward divides by the usual one, and the gradients are put right afterwards.
        usual_count = job.order.size(step - 1) * job.data.spec.items_per_sample
        loss_sum, count = nothing
        for number, micro in enumerate(window, 1):
            is_last = number == len(window)
            with nullcontext() if is_last else strategy.hold_gradients():
                micro_sum, micro_count = strategy.forward(precision.cast(micro.tensors))
                if micro.is_padding:
                    micro_sum, micro_count = micro_sum * 0.0, micro_count * 0
                loss_sum, count = loss_sum + micro_sum.detach(), count + micro_count
                if is_last:
                    tally = Tally(runtime, step, loss_sum, count, job.asked_to_stop())
                precision.backward(micro_sum * (strategy.loss_scale / usual_count))
        job.timing.doing(Activity.WAITING)
        strategy.reduce_gradients()

        precision.unscale(job.optimizer)
        is_logged = step % config.train.log_every == 0 or step == job.steps
        gradients = [p.grad for p in parameters if p.grad is not None]
        true_count = tally.count()
        job.timing.doing(Activity.OPTIMIZER)
        correction = usual_count / (true_count + (true_count == 0))  # no items, no gradient: any factor will do
        norm = scale_and_clip(gradients, correction, config.optim.clip_norm, measure=is_logged)
        progress.updates += precision.step(job.optimizer)
        job.optimizer.zero_grad()
        job.timing.doing(Activity.WAITING)
        strategy.sync_buffers()
        progress.step = step
        if job.samples is not None:
            job.samples.write(step, [i for micro in window if not micro.is_padding for i in micro.ids.tolist()])
        job.end_step()

        # What the step before told is read now: the host never waits for the step it has just queued.
        if pending is not None:
            stopping = meter.note(pending)
        pending = Step(tally, lr, norm if is_logged else None)
        is_last_step = stopping or step == job.steps
        evaluates = not stopping and job.evaluates_after(step)
        saves = is_last_step or job.saves_after(step)
        if evaluates or saves:
            stopping = meter.note(pending) or stopping
            pending = None
            if stopping:  # time may be short: the evaluation is made up when the run goes on
                is_last_step, saves, evaluates = True, True, False
        if config.train.check_replicas_every and (is_last_step or _every(config.train.check_replicas_every, step)):
            with job.deadline.aside(CHECK):
                check_replicas(job.objective.model, runtime, step)
        if evaluates:
            progress.evaluation = evaluate(job)
            meter.note_evaluation(progress.evaluation)
        if saves:
            save(job, wait=is_last_step)
        if evaluates or saves:
            meter.restart()
        if is_last_step:
            break
    return job.is_through()


def _make_up(job: Job, meter: Meter) -> None:
    """The evaluation before which the run was stopped; of a run that is through, once more what it has come to."""
    progress = job.progress
    if progress.step == 0 or not job.evaluates_after(progress.step):
        return
    if job.is_through():
        progress.evaluation = evaluate(job)
    elif progress.evaluated_step < progress.step:
        progress.evaluation = evaluate(job)
        meter.note_evaluation(progress.evaluation)
        if job.is_through():
            save(job)
    meter.restart()


def evaluate(job: Job) -> Evaluation:
    """Mean loss over the validation set; see `_evaluate`, which is timed here."""
    with job.deadline.aside(EVALUATION):
        return _evaluate(job)


def _evaluate(job: Job) -> Evaluation:
    """Mean loss over the validation set, each sample once, shared out over all ranks.

    The bare model runs, without the strategy's wrapper: a rank with fewer samples, or none, keeps nobody waiting.
    """
    config, runtime = job.config, job.runtime
    parts = runtime.world_size * (config.batch.accumulation or 1)
    micro_size = config.batch.micro_size or max(1, config.batch.global_size // parts)
    sums = torch.zeros(5, dtype=torch.float64, device=runtime.device)
    job.health.enter(Phase.EVALUATION, job.progress.step)
    job.objective.eval()
    with torch.no_grad():
        for raw in evaluation_batches(job.data.val, runtime.rank, runtime.world_size, micro_size, runtime.device):
            batch = job.precision.cast(raw)
            loss_sum, count, output = job.objective.measure(*batch)
            samples = torch.tensor(len(batch[-1]), device=runtime.device)
            sums += torch.stack(
                (loss_sum.double(), count.double(), samples.double(), *count_correct(output, batch[-1]))
            )
            job.health.beat(job.progress.step)
    job.objective.train()
    all_loss, all_items, all_samples, all_correct, all_labels = runtime.sum(sums, Phase.EVALUATION).tolist()
    job.health.enter(Phase.STEP, job.progress.step)
    assert all_samples == len(job.data.val), f"evaluated {all_samples} samples of {len(job.data.val)}"
    return Evaluation(
        loss=all_loss / all_items if all_items else math.nan,
        accuracy=all_correct / all_labels if all_labels else None,
        samples=int(all_samples),
    )


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
