"""Text as bytes: what is found, how it is split, how it is kept; and the count model that a model must beat."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.config import DataConfig
from train.data import text
from train.data.text import find_files, prepare, split, trigram_loss
from train.errors import UsageError


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def folder_of(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def many(root: Path, count: int = 40) -> Path:
    return folder_of(root, **{f"part{i // 10}__file{i}": f"<{i}>" * (20 + i % 7) for i in range(count)})


def names(*paths: Path | str) -> list[str]:
    return [file.path.name for file in find_files([str(path) for path in paths])]


def read(config: DataConfig) -> tuple[bytes, bytes]:
    prepared = prepare(config)
    return prepared.train.tobytes(), prepared.val.tobytes()


# Found


def test_a_folder_is_read_with_all_below_it_sorted_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "books", b="2", a="1", sub__c="3", sub__deep__d="4")
    assert names(folder) == ["a", "b", "c", "d"]


def test_a_glob_takes_what_matches(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "books", **{"a.txt": "1", "b.md": "2", "sub__c.txt": "3"})
    assert names(folder / "*.txt") == ["a.txt"]
    assert names(folder / "**" / "*.txt") == ["a.txt", "c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **{"a[1].txt": "one", "a1.txt": "two"})
    assert names(folder / "a[1].txt") == ["a[1].txt"]


def test_files_of_the_same_name_in_several_folders_are_all_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, one__book="1", two__book="2", three__book="3")
    assert len(names(folder)) == 3
    assert len(names(folder / "*" / "book")) == 3
    assert len(names(folder / "one" / "book", folder / "two" / "book")) == 2


def test_folders_of_the_same_name_are_all_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, one__src__a="1", two__src__a="2")
    assert len(names(folder / "one" / "src", folder / "two" / "src")) == 2


def test_the_installed_torch_is_the_default() -> None:
    files = find_files([])
    assert len(files) > 300
    assert {file.name.split("/")[0] for file in files} == {"nn", "optim", "distributed", "utils"}
    assert all(file.name.endswith(".py") for file in files)


@pytest.mark.parametrize("content", [{}, {"empty": ""}, {"one": "", "two": ""}])
def test_a_folder_without_text_is_refused(tmp_path: Path, content: dict[str, str]) -> None:
    folder = folder_of(tmp_path / "books", **content)
    folder.mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=re.escape(f"data.paths: {folder} holds no text")):
        find_files([str(folder)])


def test_too_little_text_is_refused(tmp_path: Path, cache: str) -> None:
    file = tmp_path / "short"
    file.write_text("abc")
    with pytest.raises(UsageError, match="too little text: 3 bytes leave 0 for the train part, which needs 3"):
        prepare(DataConfig(paths=[str(file)], cache_dir=cache))


# Split


@pytest.mark.parametrize(
    ("length", "fraction", "held_out"), [(1000, 0.05, 50), (1000, 0.5, 500), (101, 0.1, 10), (50, 0.01, 3)]
)
def test_of_a_single_file_the_tail_is_held_out(
    tmp_path: Path, cache: str, length: int, fraction: float, held_out: int
) -> None:
    whole = bytes(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))
    (tmp_path / "all").write_bytes(whole)
    train, val = read(DataConfig(paths=[str(tmp_path / "all")], val_fraction=fraction, cache_dir=cache))
    assert train + val == whole
    assert len(val) == held_out


def test_a_split_by_file_is_disjoint_whole_and_about_the_fraction(tmp_path: Path) -> None:
    files = find_files([str(many(tmp_path / "books"))])
    total = sum(file.size for file in files)
    for fraction in (0.05, 0.2, 0.5):
        train, val = split(files, fraction)
        assert sorted(file.name for file in train + val) == [file.name for file in files]
        assert {file.name for file in train}.isdisjoint(file.name for file in val)
        largest = max(file.size for file in files)
        assert fraction * total <= sum(file.size for file in val) < fraction * total + largest


def test_a_split_by_file_depends_on_names_alone(tmp_path: Path) -> None:
    one, two = (find_files([str(many(tmp_path / place / "books"))]) for place in ("here", "there"))
    held_out = {file.name for file in split(one, 0.2)[1]}
    assert held_out == {file.name for file in split(list(reversed(two)), 0.2)[1]}
    assert held_out != {file.name for file in one[-len(held_out) :]}
    assert held_out != {file.name for file in one[: len(held_out)]}


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out(tmp_path: Path) -> None:
    files = find_files([str(many(tmp_path / "books"))])
    assert {file.name for file in split(files, 0.1)[1]} < {file.name for file in split(files, 0.3)[1]}


def test_both_parts_of_a_split_by_file_are_the_files_bytes(tmp_path: Path, cache: str) -> None:
    folder = many(tmp_path / "books")
    train, val = read(DataConfig(paths=[str(folder)], val_fraction=0.2, cache_dir=cache))
    files = find_files([str(folder)])
    for stream, half in zip((train, val), split(files, 0.2), strict=True):
        assert stream == b"".join(file.path.read_bytes() for file in half)


@pytest.mark.parametrize("name", ["x", "notes", "empty", "a", "zz"])
def test_an_empty_file_beside_a_text_changes_nothing(tmp_path: Path, cache: str, name: str) -> None:
    folder = folder_of(tmp_path / "books", **{"book.txt": "once upon a time " * 50, name: ""})
    train, val = read(DataConfig(paths=[str(folder)], cache_dir=cache))
    assert (train + val).decode() == "once upon a time " * 50


@pytest.mark.parametrize("big", ["large", "big0", "big4"])  # by their hashes before and after `small`
def test_of_a_large_and_a_small_file_not_most_is_held_out(tmp_path: Path, cache: str, big: str) -> None:
    folder = folder_of(tmp_path / "books", **{big: "large " * 2000, "small": "small " * 20})
    train, val = read(DataConfig(paths=[str(folder)], cache_dir=cache))
    assert len(val) < len(train)


# Kept


def test_what_was_prepared_is_used_again(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(paths=[str(many(tmp_path / "books"))], cache_dir=cache)
    first = prepare(config)
    monkeypatch.setattr(text, "_write", lambda *_: pytest.fail("prepared twice"))
    again = prepare(config)
    assert again.train.tobytes() == first.train.tobytes()
    assert (again.fingerprint, again.words) == (first.fingerprint, first.words)


def test_a_changed_file_or_fraction_is_prepared_anew(tmp_path: Path, cache: str) -> None:
    folder = many(tmp_path / "books")
    first = prepare(DataConfig(paths=[str(folder)], cache_dir=cache))
    other = prepare(DataConfig(paths=[str(folder)], val_fraction=0.3, cache_dir=cache))
    assert len(other.val) > len(first.val)
    (folder / "part0" / "file0").write_text("something else")
    changed = prepare(DataConfig(paths=[str(folder)], cache_dir=cache))
    assert len({first.fingerprint, other.fingerprint, changed.fingerprint}) == 3


def test_another_folder_with_files_of_the_same_name_size_and_time_is_not_mistaken_for_it(
    tmp_path: Path, cache: str
) -> None:
    for version, content in (("v1", "a" * 500), ("v2", "b" * 500)):
        file = folder_of(tmp_path / version, book=content) / "book"
        os.utime(file, ns=(0, 0))  # as archives and image layers unpack it
    first = prepare(DataConfig(paths=[str(tmp_path / "v1" / "book")], cache_dir=cache))
    second = prepare(DataConfig(paths=[str(tmp_path / "v2" / "book")], cache_dir=cache))
    assert first.train[0] == ord("a")
    assert second.train[0] == ord("b")


def test_the_same_text_elsewhere_has_the_same_fingerprint(tmp_path: Path, cache: str) -> None:
    one, two = (
        prepare(DataConfig(paths=[str(many(tmp_path / place / "books"))], cache_dir=f"{cache}-{place}"))
        for place in ("here", "there")
    )
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("damage", ["truncated", "missing", "no index", "broken index", "index of another form"])
def test_a_damaged_cache_is_built_anew(tmp_path: Path, cache: str, damage: str) -> None:
    config = DataConfig(paths=[str(many(tmp_path / "books"))], cache_dir=cache)
    before = read(config)
    prepared = next(Path(cache).glob("text-*/"))
    if damage == "truncated":
        with (prepared / "train.bin").open("r+b") as file:
            file.truncate(10)
    elif damage == "missing":
        (prepared / "val.bin").unlink()
    elif damage == "no index":
        (prepared / "index.json").unlink()
    else:
        (prepared / "index.json").write_text('{"sizes": {"tra' if damage == "broken index" else "[1]")
    assert read(config) == before
    assert [path.name for path in Path(cache).iterdir() if path.name.startswith(".")] == []


def _prepare_in_child(config: DataConfig, start: int, results: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: wait for the others, prepare, tell how often it wrote and what it found."""
    code, writes, real = 1, [0], text._write

    def counted(*args: Any) -> None:
        writes[0] += 1
        real(*args)

    try:
        monkeypatch.setattr(text, "_write", counted)
        os.read(start, 1)  # until the parent closes its end
        prepared = prepare(config)
        os.write(results, (json.dumps([writes[0], prepared.fingerprint, len(prepared.train)]) + "\n").encode())
        code = 0
    finally:
        os._exit(code)


def test_processes_that_prepare_at_once_write_once_and_read_the_same(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(paths=[str(many(tmp_path / "books"))], cache_dir=cache)
    start, results = os.pipe(), os.pipe()
    children = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the children do not use them
            child = os.fork()
        if child == 0:
            os.close(start[1])
            _prepare_in_child(config, start[0], results[1], monkeypatch)
        children.append(child)
    for handle in (*start, results[1]):
        os.close(handle)
    with os.fdopen(results[0]) as told:
        found = [json.loads(line) for line in told]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert sorted(entry[0] for entry in found) == [0, 0, 0, 1]
    assert len({tuple(entry[1:]) for entry in found}) == 1


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "way").write_text("a file in the way")
    for place in (tmp_path / "way", tmp_path / "way" / "below"):
        with pytest.raises(UsageError, match=re.escape(f"data.cache_dir: cannot use {place}: ")):
            prepare(DataConfig(paths=[str(many(tmp_path / "books"))], cache_dir=str(place)))


def test_without_a_home_to_write_to_a_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "way").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "way"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert text.cache_dir(DataConfig()) == tmp_path / f"muster-{os.getuid()}"
    assert (tmp_path / f"muster-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "good"))
    assert text.cache_dir(DataConfig()) == tmp_path / "good" / "muster"


def test_a_full_disk_is_told_and_leaves_nothing_half_written(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(paths=[str(many(tmp_path / "books"))], cache_dir=cache)
    with monkeypatch.context() as patch:

        def full(path: Path, content: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(Path, "write_text", full)
        with pytest.raises(UsageError, match=r"\(the disk is full\); free some space or give another folder"):
            prepare(config)
    assert [path.suffix for path in Path(cache).iterdir()] == [".lock"]
    assert len(prepare(config).train) > 0


# The count model


def by_dictionaries(train: bytes, val: bytes) -> float:
    """The same model from the words of its docstring, with a dictionary an order."""
    n1, n2 = Counter(train), Counter(pairwise(train))
    n3 = Counter(zip(train, train[1:], train[2:], strict=False))
    after_1, after_2 = Counter(train[:-1]), Counter(pairwise(train[:-1]))

    def one(c: int) -> float:
        return (n1[c] + 1) / (len(train) + 256)

    def two(b: int, c: int) -> float:
        return (n2[b, c] + 5 * one(c)) / (after_1[b] + 5)

    def three(a: int, b: int, c: int) -> float:
        return (n3[a, b, c] + 5 * two(b, c)) / (after_2[a, b] + 5)

    losses = [-math.log(three(a, b, c)) for a, b, c in zip(val, val[1:], val[2:], strict=False)]
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (b"the cat sat on the mat, the cat ran at the rat", b"the cat and the rat sat"),
        (b"ab", b"abc"),
        (bytes(range(256)) * 2, b"\x00\xff\x00\x01\x02"),
    ],
)
def test_the_count_model_equals_one_made_of_dictionaries(train: bytes, val: bytes) -> None:
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in (train, val)]
    assert trigram_loss(*arrays) == pytest.approx(by_dictionaries(train, val), rel=1e-12)


@pytest.mark.slow
def test_the_count_models_chances_add_up_to_one() -> None:
    train = np.frombuffer(b"abracadabra", dtype=np.uint8)
    chances = [math.exp(-trigram_loss(train, np.array([97, 98, c], dtype=np.uint8))) for c in range(256)]
    assert sum(chances) == pytest.approx(1.0, rel=1e-9)


def test_the_count_model_says_something_of_the_shortest_text_that_is_accepted(tmp_path: Path, cache: str) -> None:
    (tmp_path / "short").write_text("abcdefgh")
    prepared = prepare(DataConfig(paths=[str(tmp_path / "short")], cache_dir=cache))
    assert len(prepared.val) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert math.isfinite(trigram_loss(prepared.train, prepared.val))
