"""Checkpoints that cannot be read for now, are read beside a job at work, or are none."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.states import same, state_at
from train.checkpoint import Checkpoints, load, step_of
from train.errors import UnreadableError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=3)


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.saved()]


# What cannot be read is not damaged


PASSING = [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE]


def fails_to_open(patch: pytest.MonkeyPatch, what: str, number: int) -> None:
    real, real_list = io.open, Path.iterdir

    def opened(file: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(file, int) and what in str(file):
            raise OSError(number, os.strerror(number), str(file))
        return real(file, *args, **more)

    def listed(folder: Path) -> Iterator[Path]:
        if what in str(folder):
            raise OSError(number, os.strerror(number), str(folder))
        return real_list(folder)

    patch.setattr(io, "open", opened)
    patch.setattr(builtins, "open", opened)
    patch.setattr(Path, "iterdir", listed)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["step-00000010/manifest.json", "step-00000010/state.pt", "checkpoints"])
def test_what_cannot_be_read_for_now_is_told_and_nothing_older_is_taken(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    for step in (5, 10):
        checkpoints.save(step, state_at(step))
    with monkeypatch.context() as patch:
        fails_to_open(patch, what, number)
        with pytest.raises(UnreadableError) as caught:
            checkpoints.newest()
    assert what.split("/", maxsplit=1)[0] in str(caught.value)
    assert (f"user {os.geteuid()} may not" if number == errno.EACCES else os.strerror(number)) in str(caught.value)
    assert names(checkpoints) == ["step-00000010", "step-00000005"]
    found = checkpoints.newest()
    assert found is not None
    assert found[1].name == "step-00000010"


def test_too_little_memory_to_load_the_newest_is_no_reason_to_take_an_older_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 10):
        checkpoints.save(step, state_at(step))
    real = torch.load

    def short(path: Path, **more: Any) -> Any:
        if "step-00000010" in str(path):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return real(path, **more)

    monkeypatch.setattr(torch, "load", short)
    with pytest.raises(UnreadableError, match=r"step-00000010 cannot be read, but may be good: .*allocate memory"):
        checkpoints.newest()


def test_a_link_to_a_disk_that_is_not_there_is_no_empty_folder(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.folder.symlink_to(tmp_path / "mount" / "checkpoints")
    with pytest.raises(UnreadableError, match="leads nowhere: is its disk mounted"):
        checkpoints.newest()


# Read beside a job at work


def test_readers_change_nothing(checkpoints: Checkpoints) -> None:
    """A save of step 10 anew is between its two renames: the one of before is what counts until then."""
    for step in (5, 10):
        checkpoints.save(step, state_at(step))
    old = checkpoints.folder / ".replaced-step-00000010"
    (checkpoints.folder / "step-00000010").rename(old)
    (checkpoints.folder / ".writing-step-00000010").mkdir()
    before = sorted(checkpoints.folder.iterdir())
    found = checkpoints.newest()
    assert found is not None
    assert same(found[0], state_at(10))
    assert found[1:] == (old, [])
    assert [step_of(path) for path in checkpoints.saved()] == [10, 5]
    assert sorted(checkpoints.folder.iterdir()) == before
    checkpoints.save(11, state_at(11))
    assert names(checkpoints) == ["step-00000011", "step-00000010", "step-00000005"]
    assert same(load(checkpoints.folder / "step-00000010"), state_at(10))
    assert not list(checkpoints.folder.glob(".*"))


def test_a_reader_whose_checkpoint_is_removed_meanwhile_takes_the_one_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(5, state_at(5))
    real = hashlib.file_digest
    saving = [10, 15, 20]

    def overtaken(*args: Any) -> Any:
        if saving:
            Checkpoints(checkpoints.folder, keep=1).save(step := saving.pop(0), state_at(step))
        return real(*args)

    class Late:
        """Each reading of a file is overtaken by a save, which removes that file's folder."""

        file_digest = staticmethod(overtaken)

    monkeypatch.setattr("train.disk.hashlib", Late)
    found = checkpoints.newest()
    assert found is not None
    assert (found[1].name, found[2]) == ("step-00000020", [])


def test_a_checkpoint_goes_by_its_name_first(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of removing an old one leaves nothing that looks damaged."""
    for step in (5, 10, 15):
        checkpoints.save(step, state_at(step))
    seen = []
    real = shutil.rmtree

    def noted(path: Path, **more: Any) -> None:
        seen.append((Path(path).name, sorted(names(checkpoints))))
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", noted)
    checkpoints.save(20, state_at(20))
    assert seen == [(".removing-step-00000005", ["step-00000010", "step-00000015", "step-00000020"])]


ODD = ["step-12x", "step-00000010.bak", "step-5", "step-²", "step--1", "step-", ".replaced-step-x"]


def test_folders_of_other_names_are_somebody_elses(checkpoints: Checkpoints) -> None:
    checkpoints.folder.mkdir()
    for name in ODD:
        (checkpoints.folder / name).mkdir()
    assert checkpoints.newest() is None
    for step in range(1, 6):
        checkpoints.save(step, state_at(step))
    assert names(checkpoints) == ["step-00000005", "step-00000004", "step-00000003"]
    left = {path.name for path in checkpoints.folder.iterdir()}
    assert left == {*names(checkpoints), *ODD[:-1], "latest"}
