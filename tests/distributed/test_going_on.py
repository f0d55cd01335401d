"""To go on from a checkpoint is to have never stopped, and to evaluate on the way changes nothing: to the last bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.jobs import Flags, config_of, make_job, weights
from tests.ranks import run_ranks
from train import loop
from train.state import Job, restore, state_of

MODULE = "tests.distributed.test_going_on"
STEPS, STOP = 12, 6
RUN = (f"train.steps={STEPS}", "batch.global_size=8", "optim.lr=0.02", "optim.warmup_steps=3", "train.log_every=1")


class Normed(nn.Module):
    """Linear layers around running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def model() -> nn.Module:
    return Normed()


def data() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(60, 4, generator=generator)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    return TensorDataset(inputs[:48], labels[:48]), TensorDataset(5 + inputs[48:], labels[48:])


BATCH_NORM = (*RUN, f"model.name={MODULE}:model", f"data.name={MODULE}:data")
SCALED = (
    *RUN, "model.name=mlp", "data.name=classification", "data.size=100", "precision.name=fp16",
    "precision.initial_scale=1024", "precision.growth_interval=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """A GPT that drops a fifth, on a text of its own."""
    folder: Path = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(bytes(range(32, 99)) * 15)
    return (
        *RUN, "model.layers=1", "model.width=16", "model.dropout=0.2", "data.block_size=8", "data.val_fraction=0.1",
        f"data.paths=[{folder / 'text.txt'}]", f"data.cache_dir={folder}",
    )  # fmt: skip


def _an_infinity_at(call: int, job: Job) -> None:
    """Make one gradient infinite, in the backward pass of that number."""
    calls = 0

    def inject(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("inf") if calls == call else gradient

    next(job.objective.model.parameters()).register_hook(inject)


def _in_one_go(flags: Flags, *, infinity: int) -> Job:
    job = make_job(config_of(*flags))
    _an_infinity_at(infinity, job)
    assert loop.fit(job)
    return job


def _stopped_and_gone_on(flags: Flags, *, infinity: int) -> tuple[Job, Job]:
    """The job that was asked to stop, and the one that took up its state from a file."""
    stopped = make_job(config_of(*flags))
    _an_infinity_at(infinity, stopped)
    stopped.asked_to_stop = lambda: stopped.progress.step == STOP - 2  # told one step, read the next
    assert not loop.fit(stopped)
    file = io.BytesIO()
    torch.save(state_of(stopped), file)
    file.seek(0)
    later = make_job(config_of(*flags))
    restore(later, torch.load(file, weights_only=True))
    assert later.progress.step == stopped.progress.step == STOP
    assert loop.fit(later)
    return stopped, later


def _assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("infinity", [0, 3], ids=["all finite", "an infinity before the stop"])
def test_a_scaled_run_that_stopped_goes_on_as_if_it_had_not(infinity: int) -> None:
    whole = _in_one_go(SCALED, infinity=infinity)
    stopped, later = _stopped_and_gone_on(SCALED, infinity=infinity)
    assert not torch.equal(weights(stopped), weights(later))
    _assert_same(weights(later), weights(whole))
    _assert_same(later.optimizer.state_dict(), whole.optimizer.state_dict())
    skipped = 1 if infinity else 0
    assert stopped.progress.updates == STOP - skipped
    assert later.progress.updates == whole.progress.updates == STEPS - skipped
    assert later.precision.state() == whole.precision.state()
    assert whole.precision.state()["scale"] == 1024 * 2 ** (2 if infinity else 3) / 2**skipped
    assert stopped.precision.state()["scale"] == 1024 * (0.5 if infinity else 2)  # not what a new scaler starts with
    assert stopped.precision.state()["_growth_tracker"] > 0  # nor a round number of good steps
    assert later.progress.evaluation == whole.progress.evaluation


def test_a_run_with_dropout_that_stopped_goes_on_with_the_masks_it_would_have_drawn(dropout: Flags) -> None:
    whole = _in_one_go(dropout, infinity=0)
    stopped, later = _stopped_and_gone_on(dropout, infinity=0)
    assert not torch.equal(weights(stopped), weights(later))
    _assert_same(weights(later), weights(whole))
    assert later.progress.updates == whole.progress.updates == STEPS


def test_a_run_with_running_statistics_that_stopped_goes_on_from_them() -> None:
    whole = _in_one_go(BATCH_NORM, infinity=0)
    _, later = _stopped_and_gone_on(BATCH_NORM, infinity=0)
    _assert_same(later.objective.model.state_dict(), whole.objective.model.state_dict())


@pytest.mark.parametrize("asked_in", [STEPS - 1, STEPS])
def test_a_stop_at_the_last_step_leaves_its_evaluation_for_later(
    asked_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time may be too short for it. The state is saved first; gone on with, the run ends as if never stopped."""
    whole = _in_one_go(SCALED, infinity=0)
    stopped = make_job(config_of(*SCALED))
    stopped.asked_to_stop = lambda: stopped.progress.step == asked_in - 1
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda _: pytest.fail("there is no time for that"))
        assert not loop.fit(stopped)
    assert (stopped.progress.step, stopped.progress.evaluated_step) == (STEPS, 0)
    assert stopped.progress.saved_step == STEPS
    later = make_job(config_of(*SCALED))
    restore(later, state_of(stopped))
    assert loop.fit(later)
    _assert_same(weights(later), weights(whole))
    assert state_of(later)["progress"] == state_of(whole)["progress"]
    assert later.progress.evaluation == whole.progress.evaluation
    again = make_job(config_of(*SCALED))
    restore(again, state_of(later))
    assert loop.fit(again)  # it was through: it says once more what it has come to
    assert again.progress.evaluation == whole.progress.evaluation


def test_dropout_is_on_again_after_an_evaluation(dropout: Flags) -> None:
    plain = _in_one_go([*dropout, "train.eval_every=0"], infinity=0)
    without = _in_one_go([*dropout, "model.dropout=0"], infinity=0)
    assert not torch.equal(weights(plain), weights(without))
    evaluated = _in_one_go([*dropout, "train.eval_every=5"], infinity=0)  # after steps 5 and 10 of 12
    _assert_same(weights(evaluated), weights(plain))


def test_evaluations_on_the_way_leave_running_statistics_alone_and_batches_normed_by_their_own() -> None:
    plain = _in_one_go([*BATCH_NORM, "train.eval_every=0"], infinity=0)
    evaluated = _in_one_go([*BATCH_NORM, "train.eval_every=5"], infinity=0)
    _assert_same(evaluated.objective.model.state_dict(), plain.objective.model.state_dict())


class Backwards(nn.Module):
    """Layers registered last to first: gradients come in another order than torch's first buckets expect."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 3)
        self.middle = nn.Linear(64, 64)
        self.first = nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())  # type: ignore[no-any-return]


def backwards() -> nn.Module:
    return Backwards()


def _three_ranks(flags: Flags) -> tuple[torch.Tensor, torch.Tensor]:
    whole = make_job(config_of(*flags, world_size=3))
    loop.fit(whole)
    part = make_job(config_of(*flags, world_size=3))
    asked = [False] * (STOP - 1) + [True] * STEPS  # seen a step later, as from a signal
    part.asked_to_stop = lambda: asked.pop(0)
    assert not loop.fit(part)
    rest = make_job(config_of(*flags, world_size=3))
    restore(rest, state_of(part))
    assert 0 < rest.progress.step < STEPS
    loop.fit(rest)
    return weights(whole), weights(rest)


@pytest.mark.parametrize("strategy", ["ddp", "manual"])
def test_three_ranks_that_go_on_add_up_in_the_same_order(strategy: str) -> None:
    flags = (*RUN, f"model.name={MODULE}:backwards", f"data.name={MODULE}:data", f"strategy.name={strategy}",
             "batch.global_size=9")  # fmt: skip
    for whole, resumed in run_ranks(3, _three_ranks, flags):
        assert torch.equal(whole, resumed)
