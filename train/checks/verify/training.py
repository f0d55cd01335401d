"""A case trained by the project's own parts: config, strategy, loop, and for a resumed one a real checkpoint."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from train import loop
from train.checks.verify.cases import Case, for_rank
from train.config import Config
from train.data import Data
from train.errors import MusterError, UsageError
from train.health import Health
from train.job import build
from train.options import LaunchOptions
from train.own import load_function
from train.progress import StepLine, log
from train.resume import resume
from train.run_folder import RunFolder, open_run
from train.runtime import Runtime
from train.state import Job
from train.strategies import DataParallel, Strategy


@dataclass
class Trained:
    """What one rank saw: rows of float64 on the CPU, one a step."""

    initial: torch.Tensor
    """Weights before the first step."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """As the optimizer saw them; NaN where a parameter had none."""
    weights: list[torch.Tensor] = field(default_factory=list)
    """After each step."""


@dataclass(frozen=True)
class Rank:
    """This process, together with the others and by itself."""

    together: Runtime
    alone: Runtime
    health: Health
    asked_to_stop: Callable[[], bool]


def train(case: Case, rank: Rank, data: Data) -> Trained | None:
    """Train a case from its start; None where it was asked to stop."""
    runtime = rank.alone if case.alone else rank.together
    seen: list[Trained] = []
    with _quietly(), tempfile.TemporaryDirectory(prefix="muster-verify-") as folder:
        if case.resumed_at:
            _train_resumed(case, rank, data, Path(folder), seen)
        else:
            loop.fit(_job(case, runtime, data, rank.health, rank.asked_to_stop, seen))
    first, *more = seen
    for one in more:
        first.gradients += one.gradients
        first.weights += one.weights
    return first if len(first.weights) == case.config.train.steps else None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the lines of a training that somebody would want to follow."""
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _train_resumed(case: Case, rank: Rank, data: Data, folder: Path, seen: list[Trained]) -> None:
    """Stop in the middle, which saves; then a new model, strategy and optimizer go on from what is on the disk."""
    options = LaunchOptions(run_id="verify", runs_dir=str(folder))
    for is_second in (False, True):
        stop = rank.asked_to_stop if is_second else (lambda: len(seen[0].weights) >= case.resumed_at - 1)
        job = _job(case, rank.together, data, rank.health, stop, seen)
        run = _open_run(options, for_rank(case.config, 0)) if rank.together.rank == 0 else None
        try:
            resume(job, options, run)
            if is_second and job.progress.step != len(seen[0].weights):
                raise MusterError(f"went on from step {job.progress.step} where {len(seen[0].weights)} were saved")
            loop.fit(job)
        finally:
            if job.saver is not None:
                job.saver.settle(10.0)
            if run is not None:
                run.release()
        if len(seen[0].weights) == 0:
            return


def _open_run(options: LaunchOptions, config: Config) -> RunFolder:
    path = Path(options.runs_dir) / "verify"
    path.mkdir(exist_ok=True)
    (path / "environment.json").write_text("{}")  # a run that has been: what is let go of is kept
    return open_run(options, config, None)


def _job(
    case: Case, runtime: Runtime, data: Data, health: Health, stop: Callable[[], bool], seen: list[Trained]
) -> Job:
    """Wired as for `python -m train run`, with somebody who looks on at the optimizer."""
    config = for_rank(case.config, 0 if case.alone else runtime.rank)
    job = build(config, runtime, data, stop, health, strategy=_strategy(case, config, runtime))
    job.line = StepLine(job.steps, "samples", shown=False)
    job.line.start(0)
    parameters = list(job.objective.parameters())
    trained = Trained(_weights(parameters))
    seen.append(trained)

    def before(*_: Any) -> None:
        flat = [torch.full_like(p, float("nan")) if p.grad is None else p.grad for p in parameters]
        trained.gradients.append(_on_cpu(flat))

    job.optimizer.register_step_pre_hook(before)
    job.optimizer.register_step_post_hook(lambda *_: trained.weights.append(_weights(parameters)))
    return job


def _strategy(case: Case, config: Config, runtime: Runtime) -> Strategy | None:
    """A strategy that the config cannot name; None: it names it."""
    if case.strategy == "dp" and runtime.device.type == "cpu":
        return DataParallel(config.strategy, runtime, split=_unequal)
    if ":" not in case.strategy:
        return None
    return load_strategy(case.strategy)(config.strategy, runtime)


def load_strategy(name: str) -> type[Strategy]:
    """A user's own, by `module:Class`. Raises UsageError."""
    found = load_function("--strategy", name)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(f"--strategy: {name} is no subclass of train.strategies.Strategy")
    return found


def _unequal(batch: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    """As nn.DataParallel cuts over GPUs of which the last gets less; a short batch fills fewer of them."""
    first = -(-2 * len(batch[0]) // 3)
    return list(zip(*(tensor.split(first) for tensor in batch), strict=True))


def _weights(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return _on_cpu([p.detach() for p in parameters])


def _on_cpu(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double().cpu().clone()
