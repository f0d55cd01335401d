"""What a checkpoint holds and takes up again; what is not worth saving is not saved, and what cannot be is no end."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from tests.jobs import config_of, make_job
from train.checkpoint import Checkpoints
from train.errors import CheckpointError, NonFiniteError
from train.progress import log
from train.saver import Saver
from train.state import Job, Progress, restore, save, state_of


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose first checkpoint, of step 1, is there."""
    job = make_job(config_of("model.name=mlp", "data.name=classification", "data.size=100"))
    names = [name for name, _ in job.objective.model.named_parameters()]
    job.saver = Saver(Checkpoints(tmp_path / "checkpoints", keep=3), names)
    job.progress.step = 1
    save(job)
    assert job.progress.saved_step == 1
    return job


def saved(job: Job) -> list[str]:
    assert job.saver is not None
    return [path.name for path in job.saver.checkpoints.saved()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fc1.weight", "fc2.bias"])
def test_weights_that_are_no_numbers_are_refused_and_the_older_checkpoint_stays(
    name: str, bad: float, job: Job
) -> None:
    job.progress.step = 2
    with torch.no_grad():
        job.objective.model.get_parameter(name).view(-1)[-1] = bad
    with pytest.raises(NonFiniteError, match=f"{name} is not finite after step 2"):
        save(job)
    assert saved(job) == ["step-00000001"]
    assert job.progress.saved_step == 1
    assert job.saver is not None
    newest = job.saver.checkpoints.newest()
    assert newest is not None
    assert bool(torch.isfinite(newest[0]["model"][name]).all())


def test_weights_are_looked_at_also_where_no_checkpoints_are_kept(job: Job) -> None:
    """On all ranks but the first: they must end too."""
    job.saver = None
    with torch.no_grad():
        job.objective.model.get_parameter("fc1.bias")[0] = math.nan
    with pytest.raises(NonFiniteError):
        save(job)


def test_a_failed_save_is_a_warning_and_the_next_one_counts_again(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise CheckpointError("cannot save step 2: the disk is full")

    job.progress.step = 2
    monkeypatch.setattr(log, "propagate", True)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="train"):
        patch.setattr(Checkpoints, "save", fail)
        save(job)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "cannot save step 2: the disk is full" in told.getMessage()
    assert job.progress.saved_step == 1
    assert saved(job) == ["step-00000001"]
    job.progress.step = 3
    save(job)
    assert job.progress.saved_step == 3
    assert saved(job) == ["step-00000003", "step-00000001"]


def test_progress_comes_back_as_it_was_and_as_saved(job: Job) -> None:
    job.progress = Progress(step=7, updates=5, saved_step=1, best_eval_loss=0.25)
    state = state_of(job)
    other = make_job(job.config)
    restore(other, state)
    assert other.progress == Progress(step=7, updates=5, saved_step=7, best_eval_loss=0.25)
    assert state["config"] == job.config.as_dict()
