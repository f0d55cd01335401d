"""What `open_data` opens: shapes, shares held out, what a model must know, and fingerprints."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from train.config import DataConfig
from train.data import Data, Spec, open_data
from train.errors import UsageError


def rows(data: Data) -> torch.Tensor:
    inputs = [samples.gather(torch.arange(len(samples)))[0] for samples in (data.train, data.val)]
    return torch.cat(inputs)


@pytest.mark.parametrize(("name", "kind"), [("classification", "classes"), ("regression", "numbers")])
def test_made_up_tables_have_the_tutorials_shapes(name: str, kind: str) -> None:
    data = open_data(DataConfig(name=name, size=200, val_fraction=0.1), seed=3)
    assert (data.spec.kind, data.spec.inputs, data.spec.outputs) == (kind, 10, 5)
    assert (data.spec.item, data.spec.items_per_sample) == ("samples", 1)
    assert (len(data.train), len(data.val)) == (180, 20)
    inputs, targets = data.train.gather(torch.arange(7))
    assert inputs.shape == (7, 10)
    assert targets.shape == ((7,) if kind == "classes" else (7, 5))
    assert targets.dtype == (torch.int64 if kind == "classes" else torch.float32)
    assert data.words == f"{name}: 180 samples, 20 held out"


@pytest.mark.parametrize("name", ["classification", "regression", "digits"])
def test_no_sample_is_both_trained_on_and_held_out(name: str) -> None:
    data = open_data(DataConfig(name=name, size=300), seed=3)
    found = rows(data)
    assert len(found) == len(data.train) + len(data.val)
    if name != "digits":  # some digits are equal to the pixel
        assert len(found.unique(dim=0)) == len(found)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_there_is_something_to_learn(name: str) -> None:
    data = open_data(DataConfig(name=name, size=500), seed=3)
    inputs, targets = (tensor.double() for tensor in data.train.gather(torch.arange(len(data.train))))
    wanted = torch.nn.functional.one_hot(targets.long(), 5).double() if name == "classification" else targets
    fit = torch.linalg.lstsq(inputs, wanted).solution
    test_inputs, test_targets = data.val.gather(torch.arange(len(data.val)))
    guess = test_inputs.double() @ fit
    if name == "classification":
        assert (guess.argmax(1) == test_targets).double().mean() > 0.6  # chance: 0.2
    else:
        assert (guess - test_targets).square().mean() < 0.02  # the noise alone: 0.01


def test_a_seed_fixes_the_table_and_another_makes_another() -> None:
    one, same, other = (open_data(DataConfig(name="regression"), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(rows(one), rows(same))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert not torch.equal(rows(one), rows(other))


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    open_data(DataConfig(name="classification"), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_digits_are_pixels_from_0_to_1_in_ten_classes() -> None:
    data = open_data(DataConfig(name="digits", val_fraction=0.2), seed=1)
    assert (data.spec.kind, data.spec.inputs, data.spec.outputs) == ("classes", 64, 10)
    assert (len(data.train), len(data.val)) == (1797 - 359, 359)
    found = rows(data)
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)
    assert data.train.gather(torch.arange(len(data.train)))[1].unique().tolist() == list(range(10))


def test_digits_without_scikit_learn_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'muster\[digits\]'"):
        open_data(DataConfig(name="digits"), seed=1)


def test_text_is_bytes_of_which_each_window_counts_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)) * 10)
    config = DataConfig(paths=[str(tmp_path / "text")], block_size=16, val_fraction=0.1, cache_dir=str(tmp_path / "c"))
    data = open_data(config, seed=1)
    assert data.spec == Spec("tokens", 256, 256, "bytes", 16)
    assert (len(data.train), len(data.val)) == (57, 7)  # ceil(899 / 16), ceil(99 / 16)
    assert data.train.gather(torch.tensor([1]))[0].tolist() == [list(range(16, 32))]
    assert data.text is not None
    assert bytes(data.text.val) == bytes(range(100))


def test_tokens_are_two_files_and_their_fingerprint_sees_both(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("train.bin", "val.bin")]
    for path, length in zip(paths, (50, 20), strict=True):
        np.arange(length, dtype=np.uint16).tofile(path)
    config = DataConfig(name="tokens", paths=paths, block_size=8, vocab_size=60)
    data = open_data(config, seed=1)
    assert data.spec == Spec("tokens", 60, 60, "tokens", 8)
    assert (len(data.train), len(data.val)) == (7, 3)
    np.arange(1, 21, dtype=np.uint16).tofile(paths[1])
    assert open_data(config, seed=1).fingerprint != data.fingerprint


def test_a_part_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data.name: regression has no training samples \(regression: 0 samples, 20"):
        open_data(DataConfig(name="regression", size=20, val_fraction=0.99), seed=1)


def test_at_least_one_sample_is_held_out() -> None:
    assert len(open_data(DataConfig(name="regression", size=20, val_fraction=0.001), seed=1).val) == 1
