"""Saving beside the training: the copy is of the moment, and what goes wrong in the background is told in front."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from train import checkpoint, disk
from train.checkpoint import Checkpoints, State, load, step_of
from train.errors import CheckpointError, NonFiniteError
from train.saver import Saver, Snapshot

Events = list[tuple[str, dict[str, Any]]]


def state_of(value: float) -> State:
    return {"model": OrderedDict(w=torch.full((4, 3), value)), "progress": {"step": int(value)}}


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def saver(tmp_path: Path, events: Events) -> Saver:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    return Saver(checkpoints, ["w"], lambda event, **facts: events.append((event, facts)))


class Gate:
    """Holds the write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        real = Checkpoints.save

        def held(checkpoints: Checkpoints, step: int, state: State) -> Path:
            self.reached.set()
            assert self.opened.wait(30)
            return real(checkpoints, step, state)

        monkeypatch.setattr(Checkpoints, "save", held)


def names(saver: Saver) -> list[str]:
    return [path.name for path in saver.checkpoints.saved()]


# The copy


def test_what_is_written_is_the_state_of_the_moment_though_training_goes_on(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    state = state_of(1.0)
    assert saver.save(1, state)
    assert gate.reached.wait(30)
    state["model"]["w"].fill_(9.0)
    state["progress"]["step"] = 9
    assert saver.saved_step == -1
    gate.opened.set()
    assert saver.wait()
    found = load(saver.checkpoints.folder / "step-00000001")
    assert found["model"]["w"].tolist() == [[1.0] * 3] * 4
    assert found["progress"] == {"step": 1}
    assert saver.saved_step == 1


def test_a_copy_is_of_the_same_structure_kind_for_kind() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": [1, ("a", None)]}
    copied = Snapshot().take(state)
    assert type(copied["model"]) is OrderedDict
    assert copied["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    other.load_state_dict(copied["model"])
    assert copied["list"] == [1, ("a", None)]
    fresh = torch.optim.AdamW(other.parameters())
    fresh.load_state_dict(copied["optimizer"])
    for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_memory_is_used_again_and_tied_weights_stay_one() -> None:
    snapshot = Snapshot()
    weight = torch.ones(5, 2)
    state = {"a": weight, "b": weight, "view": weight[:1], "transposed": weight.t()}
    first = snapshot.take(state)
    assert first["a"] is first["b"]
    assert first["view"].data_ptr() != first["a"].data_ptr()
    assert snapshot.bytes == (10 + 2 + 10) * 4
    where = {key: tensor.data_ptr() for key, tensor in first.items()}
    weight.fill_(2.0)
    second = snapshot.take(state)
    assert {key: tensor.data_ptr() for key, tensor in second.items()} == where
    assert second["transposed"].tolist() == [[2.0] * 5] * 2
    other = snapshot.take({**state, "a": torch.ones(3)})
    assert other["a"].tolist() == [1.0] * 3
    assert other["b"].tolist() == [[2.0] * 2] * 5


# One at a time


def test_a_save_waits_for_the_one_before_only_so_long(
    saver: Saver, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    assert saver.save(1, state_of(1.0))
    assert not saver.save(2, state_of(2.0), patience_s=0.01)
    assert events == [("save skipped", {"step": 2})]
    gate.opened.set()
    assert saver.save(3, state_of(3.0), patience_s=30)
    assert saver.wait()
    assert names(saver) == ["step-00000003", "step-00000001"]
    assert [event for event, _ in events] == ["save skipped", "saved", "saved"]
    assert events[-1][1]["bytes"] == 12 * 4


# What goes wrong


def failing(*_: object) -> Path:
    raise CheckpointError("cannot save: the disk is full")


def test_a_failed_save_is_an_event_and_the_third_in_a_row_ends_the_run(
    saver: Saver, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saver.save(1, state_of(1.0))
    assert saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", failing)
        for step in (2, 3):
            assert saver.save(step, state_of(step))
            assert not saver.wait()
    assert saver.save(4, state_of(4.0))  # a good one: the count starts anew
    assert saver.wait()
    monkeypatch.setattr(Checkpoints, "save", failing)
    for step in (5, 6, 7):
        assert saver.save(step, state_of(step))
    with pytest.raises(CheckpointError, match="3 saves in a row have failed; the last: cannot save: the disk is full"):
        saver.save(8, state_of(8.0))
    assert names(saver) == ["step-00000004", "step-00000001"]
    told = [(event, facts["step"]) for event, facts in events]
    assert told == [
        ("saved", 1), ("save failed", 2), ("save failed", 3), ("saved", 4),
        ("save failed", 5), ("save failed", 6), ("save failed", 7),
    ]  # fmt: skip
    assert events[-1][1]["why"] == "cannot save: the disk is full"


def test_weights_that_are_no_numbers_are_not_written(saver: Saver) -> None:
    assert saver.save(1, state_of(1.0))
    bad = state_of(2.0)
    bad["model"]["w"][3, 2] = float("nan")
    assert saver.save(2, bad)
    with pytest.raises(NonFiniteError, match="w is not finite after step 2: not saved"):
        saver.wait()
    with pytest.raises(NonFiniteError):
        saver.save(3, state_of(3.0))
    assert names(saver) == ["step-00000001"]


def test_a_buffer_may_hold_infinity_and_large_weights_may_overflow_their_sum(saver: Saver) -> None:
    state = {"model": {"w": torch.full((4,), 3e38), "mask": torch.tensor([float("-inf")])}}
    assert saver.save(1, state)
    assert saver.wait()


def test_what_would_not_fit_is_not_begun(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 40

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(CheckpointError, match="the disk is full: it takes 0 MB, and 0 MB are free"):
        saver.checkpoints.save(1, state_of(1.0))
    Usage.free = 48
    with pytest.raises(pytest.fail.Exception):
        saver.checkpoints.save(1, state_of(1.0))


def test_multiples_stay_besides_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, keep_every=100)
    for step in range(50, 401, 50):
        checkpoints.save(step, state_of(step))
    assert [path.name[-3:] for path in checkpoints.saved()] == ["400", "350", "300", "200", "100"]


# Killed at any moment


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory: nothing of this depends on the disk, and hundreds of fsync are slow there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


TOUCH_NO_DISK = ("_step", "_is_name", "name_of", "step_of")


def lines_of_a_save(act: Callable[[], object], at_line: Callable[[int, str], None]) -> None:
    """Run `act`; tell number and place of each line of train/checkpoint.py and disk.py before it is executed."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        name = frame.f_code.co_name
        if frame.f_code.co_filename not in (checkpoint.__file__, disk.__file__) or name in TOUCH_NO_DISK:
            return None
        if name.startswith("<"):  # a comprehension is a line of its function
            return None
        if event == "line":
            at_line(count, f"{frame.f_code.co_name}:{frame.f_lineno}")
            count += 1
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)


def moments(folder: Path, act: Callable[[Checkpoints], object]) -> Iterator[tuple[str, Checkpoints]]:
    """The folder as a kill -9 leaves it, at each line of a save that runs in a process of its own."""
    places: list[str] = []
    whole = Checkpoints(folder / "whole", keep=1)
    whole.save(5, state_of(5.0))
    lines_of_a_save(lambda: act(whole), lambda _, place: places.append(place))
    for number, place in enumerate(places):
        checkpoints = Checkpoints(folder / f"killed-{number}", keep=1)
        checkpoints.save(5, state_of(5.0))
        pid = os.fork()
        if pid == 0:
            lines_of_a_save(
                lambda checkpoints=checkpoints: act(checkpoints),  # type: ignore[misc]
                lambda at, _, number=number: os.kill(os.getpid(), signal.SIGKILL) if at == number else None,  # type: ignore[misc]
            )
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, f"it was not killed at {place}"
        yield place, checkpoints


@pytest.mark.parametrize("step", [10, 5], ids=["the next step", "the same step once more"])
def test_killed_at_any_line_of_a_save_there_is_a_whole_checkpoint_and_the_next_save_works(
    in_memory: Path, step: int
) -> None:
    places = []
    for place, checkpoints in moments(in_memory, lambda to: to.save(step, state_of(20.0))):
        places.append(place)
        found = checkpoints.newest()
        assert found is not None, place
        state, path, passed_over = found
        assert passed_over == [], place
        assert float(state["model"]["w"][0, 0]) in (5.0, 20.0), place
        assert step_of(path) in (5, step), place
        pointed = checkpoints.folder / (checkpoints.folder / "latest").read_text().strip()
        assert pointed.exists() or step == 5, place
        checkpoints.save(30, state_of(30.0))
        left = sorted(entry.name for entry in checkpoints.folder.iterdir())
        assert left == ["latest", "step-00000030"], place
    functions = {place.split(":")[0] for place in places}
    assert {"save", "hash_of_file", "sync", "_point_to", "_remove", "_clear"} <= functions
    assert len(set(places)) >= 30


def test_killed_in_mid_file_the_one_before_is_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(5, state_of(5.0))
    whole = (checkpoints.folder / "step-00000005" / "state.pt").read_bytes()
    for part in range(1, len(whole), len(whole) // 12):
        pid = os.fork()
        if pid == 0:

            def cut(state: State, path: Path, part: int = part) -> None:
                path.write_bytes(whole[:part])
                os.kill(os.getpid(), signal.SIGKILL)

            torch.save = cut  # type: ignore[assignment]
            checkpoints.save(10, state_of(10.0))
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert (checkpoints.folder / ".writing-step-00000010" / "state.pt").stat().st_size == part
        found = checkpoints.newest()
        assert found is not None
        assert (found[1].name, found[2]) == ("step-00000005", [])


def test_before_the_first_save_its_time_is_guessed_from_the_size_that_is_to_come(tmp_path: Path) -> None:
    small = Saver(Checkpoints(tmp_path, keep=1), ["w"])
    large = Saver(Checkpoints(tmp_path, keep=1), ["w"], expected_bytes=10**10)
    assert small.seconds < 2
    assert large.seconds > 100


def test_an_error_that_nobody_foresaw_ends_the_run_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(Checkpoints(tmp_path, keep=1), ["w"])
    monkeypatch.setattr(saver.checkpoints, "save", lambda *_: (_ for _ in ()).throw(MemoryError("too large")))
    assert saver.save(1, {"model": {"w": torch.ones(2)}})
    with pytest.raises(MemoryError, match="too large"):
        saver.save(2, {"model": {"w": torch.ones(2)}})
