"""Which checkpoint a run goes on from where a folder was given, and what is said of those passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train import resume
from train.checkpoint import Checkpoints
from train.errors import CheckpointError, UsageError


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 5 and 10."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    for step in (5, 10):
        checkpoints.save(step, {"step": step, "w": torch.ones(3)})
    return tmp_path / "run"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr("train.resume.log.warning", words.append)
    return words


def test_a_run_its_checkpoints_and_one_of_them_may_be_given(given: Path, said: list[str]) -> None:
    folder = given / "checkpoints"
    assert [resume._given_state(path)["step"] for path in (given, folder, folder / "step-00000005")] == [10, 10, 5]
    assert said == []


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_damaged_one_in_a_folder_that_was_given_is_named(given: Path, below: str, said: list[str]) -> None:
    (given / "checkpoints" / "step-00000010" / "state.pt").write_bytes(b"")
    assert resume._given_state(given / below)["step"] == 5
    (words,) = said
    assert "step-00000010/state.pt is damaged: 0 bytes" in words
    assert words.endswith("; taking step-00000005 instead")


@pytest.mark.parametrize("lost", ["manifest.json", "state.pt"])
def test_of_one_that_was_given_itself_it_is_said_what_it_lacks(given: Path, lost: str) -> None:
    one = given / "checkpoints" / "step-00000010"
    (one / lost).unlink()
    with pytest.raises(CheckpointError, match=f"step-00000010 is not a whole checkpoint: it has no {lost}"):
        resume._given_state(one)


def test_nothing_and_nonsense_are_told_apart_from_damage(given: Path, tmp_path: Path) -> None:
    for nothing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError, match="is neither a checkpoint nor a run folder that holds one"):
            resume._given_state(nothing)
