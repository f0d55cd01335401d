"""One rank from config to verdict: the wiring page."""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from train import loop, summary
from train.collective_errors import in_words
from train.config import Config
from train.data import Batches, Data, Order, open_data
from train.deadline import Deadline
from train.diagnosis import flatten
from train.eager import keep_compiler_out
from train.errors import CheckpointError, MusterError, UsageError
from train.health import Health
from train.identity import Identity, stable_run_id, time_is_up_s
from train.metrics import Metrics, SampleLog
from train.models import Objective, build_loss, build_model
from train.optim import build_optimizer
from train.options import LaunchOptions
from train.precision import Precision
from train.progress import StepLine, log, log_to_file
from train.replicas import check_replicas
from train.resume import resume
from train.run_folder import RunFolder, open_run
from train.runtime import Runtime
from train.seam import Activity, Exit, Phase
from train.state import Job
from train.stop import StopRequest
from train.strategies import STRATEGIES, DataParallel, Strategy, make_strategy
from train.times import TimesLog

ADVICE = {
    "torch": "install the same torch on every host",
    "data": "the hosts hold different files: copy the same data to all of them",
    "": "start every rank with the same recipe and the same options",
}
_LAST_SAVE_S = 2.0
"""How long a rank that has failed lets the save in hand come to its end: the other ranks may wait for its own."""
_OF_A_HOST = ("runtime.interface", "data.cache_dir", "data.paths")
"""Fields that may be others on other hosts; the data itself is compared by its fingerprint."""


def run(config: Config, options: LaunchOptions, me: Identity, health: Health) -> Exit:
    """Train as one rank; the exit code of a run that ended well. Raises MusterError where it did not."""
    # One rank's clock decides: the request of one stops all, at the same step.
    deadline = Deadline(time_is_up_s(os.environ) if me.rank == 0 else None)
    stop = StopRequest(health, deadline)
    who = f"rank {me.rank} ({socket.gethostname()})"
    with in_words(who, lambda: (Phase.STARTING, "while starting")):
        health.doing(Activity.JOINING)
        runtime = Runtime(
            me, config.runtime, threads=config.train.threads, group=STRATEGIES[config.strategy.name].needs_group,
            has_agent=health.has_agent,
        )  # fmt: skip
        health.doing(Activity.PREPARING)
        data = runtime.together(lambda: open_data(config.data, config.train.seed))
        runtime.agree({**_settings(config), "torch": torch.__version__, "data": data.fingerprint}, ADVICE)
        job = build(config, runtime, data, stop, health)  # before there is a folder: what is refused leaves none
        folder, path = _open_folder(config, options, runtime)
        try:
            resume(job, options, folder)
        except UsageError:
            if folder is not None:
                folder.release()
            raise
        _tell(deadline, job)
        _describe(job, folder, path)
    log.info(f"{_ranks(runtime)} · {data.words}")
    outcome, code, cause = "failed", Exit.RANK_FAILED, None
    try:
        with in_words(who, lambda: (health.phase, _when(job))):
            stop.listen(quietly=me.rank != 0)
            finished = _train(job, folder, path)
        is_saved = job.progress.saved_step == job.progress.step
        if finished:
            outcome, code = "finished", Exit.FINISHED
        else:
            outcome, code = "stopped", Exit.STOPPED_SAVED if is_saved else Exit.STOPPED_UNSAVED
        return code
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, MusterError):
            code, cause = error.exit_code, str(error)
        elif isinstance(error, KeyboardInterrupt):
            outcome, code = "stopped", Exit.STOPPED_UNSAVED
        raise
    finally:
        job.line.close()
        if job.metrics is not None:
            job.metrics.close()
        if job.saver is not None:
            job.saver.settle(_LAST_SAVE_S)
        if job.times is not None:
            job.times.end(job.progress.step, code)
        if folder is not None and not health.has_agent:  # an agent knows how the other ranks ended
            folder.conclude(outcome, code, job.progress.step, cause=cause)
            summary.report(path)


def build(
    config: Config,
    runtime: Runtime,
    data: Data,
    stop: Callable[[], bool] = lambda: False,
    health: Health | None = None,
    strategy: Strategy | None = None,
) -> Job:
    """Model, strategy, optimizer and the rest for one rank; nothing is trained or written yet. Raises UsageError.

    `strategy` stands in for the one that the config names.
    """
    if not config.model.compile:
        keep_compiler_out()
    order = Order(len(data.train), config.batch.global_size, seed=config.train.seed, drop_last=config.data.drop_last)
    torch.manual_seed(config.train.seed)  # the same on all ranks: replicas start equal
    precision = Precision(config.precision, runtime.device)
    model, loss = runtime.together(
        lambda: (build_model(config.model, data.spec, config.data.block_size), build_loss(config.model))
    )
    objective = Objective(precision.prepare(model).to(runtime.device), loss, precision.autocast)
    strategy = strategy or make_strategy(config.strategy, runtime)
    strategy.wrap(cast(torch.nn.Module, torch.compile(objective)) if config.model.compile else objective)
    if isinstance(strategy, DataParallel) and strategy.note:
        log.warning(strategy.note)
    steps = config.train.epochs * order.batches_per_epoch if config.train.epochs else config.train.steps
    return Job(
        config=config,
        steps=steps,
        runtime=runtime,
        data=data,
        order=order,
        batches=Batches(data.train, order, runtime.rank, runtime.world_size, config.batch, config.data, runtime.device),
        objective=objective,
        strategy=strategy,
        precision=precision,
        optimizer=build_optimizer(objective, config.optim, scaled=precision.scaler is not None),
        line=StepLine(steps, data.spec.item, shown=runtime.rank == 0),
        asked_to_stop=stop,
        health=health or Health(),
    )


def _train(job: Job, folder: RunFolder | None, path: Path) -> bool:
    """To the end or to a stop; whether it came to the end."""
    if folder is not None:
        job.metrics = Metrics(path, after_step=job.progress.step, tensorboard=job.config.train.tensorboard)
    if job.config.train.log_samples:
        job.samples = SampleLog(path / "samples" / f"rank{job.runtime.rank}.jsonl", after_step=job.progress.step)
    job.line.start(job.progress.step)
    if job.config.train.check_replicas_every:
        check_replicas(job.objective.model, job.runtime, job.progress.step)
    finished = loop.fit(job)
    job.health.enter(Phase.ENDING, job.progress.step)
    job.line.close()
    if finished and job.progress.saved_step != job.progress.step:
        raise CheckpointError("trained to the end, but the last checkpoint could not be saved: free space, run again")
    job.runtime.close()
    if folder is not None:
        summary.tell(job, path, finished=finished)
    return finished


def _tell(deadline: Deadline, job: Job) -> None:
    """What is ahead of a run, and how long it takes."""
    saver = job.saver
    job.deadline = deadline
    deadline.save_s = lambda: saver.seconds if saver is not None else 0.0
    deadline.evaluates_next = lambda: job.evaluates_after(job.progress.step + 1)
    deadline.waits_to_save_next = lambda: (
        saver is not None and saver.is_writing and job.saves_after(job.progress.step + 1)
    )
    deadline.steps_an_evaluation = len(job.data.val) / job.config.batch.global_size


def _settings(config: Config) -> dict[str, str]:
    """What must be equal on all ranks, field by field."""
    return {name: str(value) for name, value, _ in flatten(config.as_dict()) if name not in _OF_A_HOST}


def _when(job: Job) -> str:
    step = job.progress.step
    return {
        Phase.STARTING: "before the first step",
        Phase.EVALUATION: f"in the evaluation after step {step}",
        Phase.SAVING: f"while step {step} was saved",
        Phase.ENDING: f"after the last step, {step}",
    }.get(job.health.phase, f"in step {step + 1}")


def _open_folder(config: Config, options: LaunchOptions, runtime: Runtime) -> tuple[RunFolder | None, Path]:
    """Rank 0 chooses and locks the run folder; the others have one of that name, on their own disk or the same."""
    folder: RunFolder | None = None
    told: tuple[str, str] = ("", "")
    if runtime.rank == 0:
        try:
            folder = open_run(options, config, stable_run_id(os.environ))
            told = (folder.run_id, "")
        except UsageError as error:
            told = ("", str(error))
    run_id, problem = runtime.broadcast(told)
    if problem:
        raise UsageError(problem)
    return folder, Path(options.runs_dir) / run_id


def _describe(job: Job, folder: RunFolder | None, path: Path) -> None:
    """From here on there is a run: a log on every rank, and what it is, by rank 0."""
    runtime = job.runtime
    hosts = list(dict.fromkeys(runtime.gather(runtime.host)))
    start_id = runtime.broadcast(secrets.token_hex(6))

    def write() -> None:
        try:
            if not job.health.has_agent:  # that writes down what this rank says
                node = hosts.index(runtime.host)
                log_to_file(path, node, runtime.host, runtime.rank)
                file = path / "times" / f"rank{runtime.rank}.jsonl"
                job.times = TimesLog(file, job.health, start_id, runtime.rank, node)
            job.health.tell_run_folder(path)
            log.info(f"run folder {path}")
            facts = {**_environment(job.config, runtime, hosts), "training_samples": len(job.data.train)}
            for changed in folder.describe(job.config, facts) if folder else ():
                log.warning(f"{changed}: from here on equal to rounding, not to the last bit")
        except OSError as error:
            who = f"rank {runtime.rank} ({runtime.host})"
            raise UsageError(f"--runs-dir: {who} cannot write its log: {error}") from None

    runtime.together(write)


def _environment(config: Config, runtime: Runtime, hosts: list[str]) -> dict[str, Any]:
    """Facts on which bit-identity rests."""
    return {
        "config_digest": config.digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
        "backend": runtime.backend,
        "world_size": runtime.world_size,
        "threads": torch.get_num_threads(),
        "hosts": hosts,
        "started_by": runtime.me.source,
    }


def _ranks(runtime: Runtime) -> str:
    count = "1 rank" if runtime.world_size == 1 else f"{runtime.world_size} ranks"
    return (
        f"{count} on {runtime.device.type} by {runtime.backend}" if runtime.joined else f"{count} on {runtime.device}"
    )
