"""Checkpoints: whole or not there, verified before use, and what is done about those that are damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.states import flip_a_bit, same, state_at
from train.checkpoint import Checkpoints, State, load
from train.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=3)


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.saved()]


# Whole


def test_what_was_saved_comes_back_to_the_bit(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(12, state_at(12))
    assert path == checkpoints.folder / "step-00000012"
    found = checkpoints.newest()
    assert found is not None
    state, taken, damaged = found
    assert same(state, state_at(12))
    assert (taken, damaged) == (path, [])


def test_plain_torch_reads_it_without_trusting_it(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(3, state_at(3))
    state = torch.load(path / "state.pt", weights_only=True)
    nn.Linear(4, 3).load_state_dict(state["model"])
    assert same(state, state_at(3))


def test_the_manifest_is_what_sha256sum_and_ls_would_say(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(3, state_at(3))
    manifest = json.loads((path / "manifest.json").read_text())
    content = (path / "state.pt").read_bytes()
    expected = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    assert manifest["files"] == {"state.pt": expected}
    assert (manifest["step"], manifest["torch"]) == (3, torch.__version__)


def test_latest_names_the_newest(checkpoints: Checkpoints) -> None:
    for step in (5, 10):
        checkpoints.save(step, state_at(step))
        assert (checkpoints.folder / "latest").read_text() == f"step-{step:08}\n"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000005", "step-00000010"]


def test_no_checkpoint_is_no_error(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    checkpoints.folder.mkdir()
    assert checkpoints.newest() is None


def test_only_the_newest_are_kept(checkpoints: Checkpoints) -> None:
    for step in (2, 9, 10, 11, 100):
        checkpoints.save(step, state_at(step))
    assert names(checkpoints) == ["step-00000100", "step-00000011", "step-00000010"]


def test_a_step_saved_again_replaces_the_one_before(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, state_at(1))
    checkpoints.save(7, state_at(2))
    assert same(load(checkpoints.folder / "step-00000007"), state_at(2))


def test_a_checkpoint_just_written_is_never_the_one_that_is_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    late = checkpoints.save(30, state_at(30))
    flip_a_bit(late / "state.pt")  # so the run went on from before it
    path = checkpoints.save(20, state_at(20))
    assert path.exists()
    assert (checkpoints.folder / "latest").read_text().strip() in names(checkpoints)
    found = checkpoints.newest()
    assert found is not None
    assert same(found[0], state_at(20))


# Damaged


def damage(path: Path, how: str) -> None:
    if how == "one flipped bit":
        flip_a_bit(path / "state.pt")
    elif how == "a truncated file":
        content = (path / "state.pt").read_bytes()
        (path / "state.pt").write_bytes(content[:-1])
    elif how == "an empty file":
        (path / "state.pt").write_bytes(b"")
    elif how == "no state":
        (path / "state.pt").unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "half a manifest":
        (path / "manifest.json").write_text('{"step": 1, "fil')
    elif how == "a manifest of another form":
        (path / "manifest.json").write_text('["step", 1]')
    elif how == "no folder":
        shutil.rmtree(path)
        path.write_text("")


WAYS = ["one flipped bit", "a truncated file", "an empty file", "no state", "no manifest", "half a manifest",
        "a manifest of another form", "no folder"]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(checkpoints: Checkpoints, how: str) -> None:
    for step in (5, 10):
        checkpoints.save(step, state_at(step))
    damage(checkpoints.folder / "step-00000010", how)
    with pytest.raises(CheckpointError, match="step-00000010"):
        load(checkpoints.folder / "step-00000010")
    found = checkpoints.newest()
    assert found is not None
    state, path, damaged = found
    assert same(state, state_at(5))
    assert path.name == "step-00000005"
    assert len(damaged) == 1
    assert "step-00000010" in damaged[0]


def test_damage_is_told_with_both_sizes_and_hashes(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(5, state_at(5))
    before = (path / "state.pt").read_bytes()
    damage(path, "a truncated file")
    after = (path / "state.pt").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path / 'state.pt'} is damaged: {len(after)} bytes with hash {hashlib.sha256(after).hexdigest()[:12]}, "
        f"but its manifest says {len(before)} with {hashlib.sha256(before).hexdigest()[:12]}"
    )


def test_where_all_are_damaged_nothing_starts_anew_in_silence(checkpoints: Checkpoints) -> None:
    for step, how in ((5, "one flipped bit"), (10, "no manifest")):
        damage(checkpoints.save(step, state_at(step)), how)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.newest()
    words = str(caught.value)
    assert words.startswith(f"no checkpoint in {checkpoints.folder} is whole: ")
    assert words.index("step-00000010") < words.index("step-00000005")


def test_a_damaged_one_that_was_passed_over_is_not_kept_in_the_place_of_a_good_one(tmp_path: Path) -> None:
    """Stopped and saved between two round steps; that save was damaged, and the run has gone past it."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 7):
        checkpoints.save(step, state_at(step))
    flip_a_bit(checkpoints.folder / "step-00000007" / "state.pt")
    found = checkpoints.newest()
    assert found is not None
    assert found[1].name == "step-00000005"
    checkpoints.save(10, state_at(10))
    assert names(checkpoints) == ["step-00000010", "step-00000005"]
    checkpoints.save(15, state_at(15))
    assert names(checkpoints) == ["step-00000015", "step-00000010"]


def test_a_checkpoint_that_asks_to_be_trusted_is_refused_in_words(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(5, {"model": Path("not plain data")})
    with pytest.raises(CheckpointError, match="step-00000005"):
        load(path)


def test_each_flipped_bit_of_a_manifest_is_found_or_means_nothing(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(5, state_at(5))
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    found = 0
    for at in range(8 * len(whole)):
        content = bytearray(whole)
        content[at // 8] ^= 1 << at % 8
        manifest.write_bytes(content)
        try:
            assert same(load(path), state_at(5))
        except CheckpointError as error:
            assert type(error) is CheckpointError  # damage, told as such
            found += 1
    assert found > 8 * 64  # the hash alone has so many bits


# Interrupted


def test_a_half_written_checkpoint_is_none(checkpoints: Checkpoints) -> None:
    whole = checkpoints.save(5, state_at(5))
    aside = checkpoints.folder / ".writing-step-00000010"
    shutil.copytree(whole, aside)
    (aside / "manifest.json").unlink()
    assert names(checkpoints) == ["step-00000005"]
    found = checkpoints.newest()
    assert found is not None
    assert found[1:] == (whole, [])
    checkpoints.save(10, state_at(10))
    assert not aside.exists()
    assert same(load(checkpoints.folder / "step-00000010"), state_at(10))


def test_a_crash_at_any_moment_of_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that touches the disk dies in turn, as at a power cut: no cleaning up afterwards."""

    class Cut(BaseException):
        pass

    places = [(torch, "save"), (Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (Path, "replace")]
    reached = 0
    for owner, name in places:
        for count in range(5):
            checkpoints = Checkpoints(tmp_path / f"{name}-{count}", keep=1)
            checkpoints.save(5, state_at(5))
            calls = 0
            real = getattr(owner, name)

            def dying(*args: Any, real: Any = real, count: int = count, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > count:
                    raise Cut
                return real(*args, **more)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, dying)
                try:
                    checkpoints.save(10, state_at(10))
                except Cut:
                    reached += 1
            found = checkpoints.newest()
            assert found is not None
            assert same(found[0], state_at(found[0]["progress"]["step"]))
            assert found[2] == []
    assert reached >= 6


def test_everything_is_on_the_disk_before_it_gets_its_name(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(handle: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        sync(handle)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    checkpoints.save(5, state_at(5))
    at = events.index("rename .writing-step-00000005 to step-00000005")
    assert {"sync state.pt", "sync manifest.json", "sync .writing-step-00000005"} <= set(events[:at])
    assert "sync checkpoints" in events[at:]  # and the name itself, after
    # A new folder has a name in the one above it, which may be new as well.
    assert {f"sync {folder.name}" for folder in list(checkpoints.folder.absolute().parents)[:-1]} <= set(events)


def full_disk(kind: str) -> Any:
    def save(state: State, path: Path) -> None:
        path.write_bytes(b"half of it")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            if kind == "OSError":
                raise
            raise RuntimeError("[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed") from None

    return save


@pytest.mark.parametrize("kind", ["OSError", "RuntimeError"])
def test_a_full_disk_is_told_and_leaves_the_older_one(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    checkpoints.save(5, state_at(5))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk(kind))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(10, state_at(10))
    assert str(caught.value) == f"cannot save step 10 in {checkpoints.folder}: the disk is full"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000005"]
    assert (checkpoints.folder / "latest").read_text() == "step-00000005\n"
    found = checkpoints.newest()
    assert found is not None
    assert same(found[0], state_at(5))
    checkpoints.save(10, state_at(10))
    assert names(checkpoints)[0] == "step-00000010"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "way").write_text("a file in the way")
    with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*way: \w+Error"):
        Checkpoints(tmp_path / "way", keep=1).save(1, state_at(1))
