"""The user's own functions: found, refused with words, and their data sets fetched and told apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from train.config import DataConfig
from train.data import open_data
from train.data.own import OwnSamples
from train.errors import UsageError
from train.own import load_function

MODULE = """
import torch
from torch.utils.data import TensorDataset

made = {}
number = 7

def build_data(size=6, **more):
    return made.get("data") or (table(size), table(4))

def table(size):
    return TensorDataset(torch.arange(size).float(), torch.arange(size) ** 2)

def build_model():
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's module `mine` in the folder they start in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "mine.py").write_text(MODULE)
    import mine  # type: ignore[import-not-found]

    yield mine
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "numpy")):
            del sys.modules[name]


def refused(name: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_function("model.name", name)
    return str(caught.value)


# Functions


def test_a_function_is_found_in_the_folder_one_starts_in(mine: Any) -> None:
    assert load_function("data.name", "mine:build_data") is mine.build_data


def test_a_dotted_module_is_imported(mine: Any) -> None:
    assert load_function("model.name", "torch.nn:Linear") is torch.nn.Linear


def test_a_missing_module_names_the_field_and_the_remedy(mine: Any) -> None:
    words = refused("my_models:build")
    assert words.startswith("model.name: no module 'my_models' here (for 'my_models:build'): start in the folder")
    assert "PYTHONPATH" in words


def test_a_missing_function_names_the_one_most_like_it(mine: Any) -> None:
    assert refused("mine:build_modle") == "model.name: mine has no function 'build_modle'; did you mean build_model?"
    assert refused("mine:qqq") == "model.name: mine has no function 'qqq'"


def test_what_cannot_be_called_is_no_function(mine: Any) -> None:
    assert "mine has no function 'number'" in refused("mine:number")


def test_a_module_that_fails_is_told_with_its_error(mine: Any, tmp_path: Path) -> None:
    (tmp_path / "mine_broken.py").write_text("1 / 0")
    words = "model.name: mine_broken:f: importing mine_broken failed: ZeroDivisionError: division by zero"
    assert refused("mine_broken:f") == f"{words} ({tmp_path / 'mine_broken.py'}, line 1)"
    (tmp_path / "mine_unreadable.py").write_text("def f(:")
    assert "importing mine_unreadable failed: SyntaxError" in refused("mine_unreadable:f")


@pytest.mark.parametrize("absent", ["no_such_package", "mine_no", "mine"])
def test_what_a_module_itself_cannot_import_is_told_as_its_fault(mine: Any, tmp_path: Path, absent: str) -> None:
    del sys.modules["mine"]
    (tmp_path / "mine.py").unlink()
    (tmp_path / "mine_needs.py").write_text(f"import {absent}")
    words = refused("mine_needs:f")
    assert "importing mine_needs failed" in words
    assert f"No module named '{absent}'" in words


# Data sets


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


class Gathers(Rows):
    def gather(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [ids + 100, ids]


def test_samples_are_fetched_by_whole_batches_where_the_set_knows_how() -> None:
    ids = torch.tensor([2, 0, 2])
    table = OwnSamples(TensorDataset(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([1, 2, 3])))
    assert [t.tolist() for t in table.gather(ids)] == [[7.0, 5.0, 7.0], [3, 1, 3]]
    assert [t.tolist() for t in OwnSamples(Gathers([0] * 3)).gather(ids)] == [[102, 100, 102], [2, 0, 2]]
    plain = OwnSamples(Rows([(torch.tensor([float(i), 0.5]), i) for i in range(3)]))
    assert [t.tolist() for t in plain.gather(ids)] == [[[2.0, 0.5], [0.0, 0.5], [2.0, 0.5]], [2, 0, 2]]
    assert [len(s) for s in (table, plain)] == [3, 3]
    assert all(isinstance(s.gather(ids), tuple) for s in (table, plain, OwnSamples(Gathers([0]))))


def test_own_data_is_opened_with_its_arguments(mine: Any) -> None:
    data = open_data(DataConfig(name="mine:build_data", args={"size": 9}), seed=1)
    assert (data.spec.kind, len(data.train), len(data.val)) == ("own", 9, 4)
    assert data.words == "mine:build_data: 9 samples, 4 held out"
    assert [t.tolist() for t in data.train.gather(torch.tensor([8]))] == [[8.0], [64]]


def test_a_plain_list_of_pairs_is_a_data_set(mine: Any) -> None:
    mine.made["data"] = ([(1.0, 2), (3.0, 4)], [(5.0, 6)])
    data = open_data(DataConfig(name="mine:build_data"), seed=1)
    assert [t.tolist() for t in data.train.gather(torch.tensor([1]))] == [[3.0], [4]]


def fingerprint_of(mine: Any, train: Any) -> str:
    mine.made["data"] = (train, [(0.0, 1)])
    return open_data(DataConfig(name="mine:build_data"), seed=1).fingerprint


def test_fingerprints_tell_other_samples_and_lengths_apart(mine: Any) -> None:
    rows = [(float(i), i) for i in range(50)]
    same = fingerprint_of(mine, rows), fingerprint_of(mine, list(rows))
    others = [fingerprint_of(mine, rows[:-1]), fingerprint_of(mine, [(9.0, 9), *rows[1:]]),
              fingerprint_of(mine, [*rows[:-1], (9.0, 9)])]  # fmt: skip
    assert same[0] == same[1]
    assert len({same[0], *others}) == 4
    assert same[0].startswith("50+1:")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_samples_of_any_type_have_a_fingerprint(mine: Any, dtype: torch.dtype) -> None:
    one, two = torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
    assert fingerprint_of(mine, [(one, 1)]) != fingerprint_of(mine, [(two, 1)])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (7, "mine:build_data must return (training set, validation set), not a int"),
        (([(1, 2)],), "must return (training set, validation set), not a tuple"),
        (([(1, 2)], [(1, 2)], [(1, 2)]), "must return (training set, validation set), not a tuple"),
        ((Stream(), Stream()), "returned a Stream, which has no length or index"),
        (([(1, 2)], iter([1])), "returned a list_iterator, which has no length or index"),
        (([1, 2], [(1, 2)]), "samples of mine:build_data must be (input, …, target), not a int"),
        (([(1,)], [(1, 2)]), "samples of mine:build_data must be (input, …, target), not a tuple"),
        (([], [(1, 2)]), "mine:build_data has no training samples"),
        (([(1, 2)], []), "mine:build_data has no validation samples"),
    ],
)
def test_what_is_no_pair_of_indexable_sets_is_refused(mine: Any, made: Any, words: str) -> None:
    mine.build_data = lambda: made
    with pytest.raises(UsageError) as caught:
        open_data(DataConfig(name="mine:build_data"), seed=1)
    assert words in str(caught.value)
    assert str(caught.value).startswith("data.name: ")
