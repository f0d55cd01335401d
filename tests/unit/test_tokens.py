"""Windows over a stream of tokens, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from train.data.tokens import NO_TARGET, Windows, fingerprint
from train.errors import UsageError


def stream_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.uint16)


def test_windows_lie_side_by_side_and_targets_are_one_ahead() -> None:
    windows = Windows(stream_of(10, 11, 12, 13, 14, 15, 16), 3)
    assert len(windows) == 2
    inputs, targets = windows.gather(torch.tensor([1, 0]))
    assert inputs.tolist() == [[13, 14, 15], [10, 11, 12]]
    assert targets.tolist() == [[14, 15, 16], [11, 12, 13]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_past_the_end_nothing_is_asked() -> None:
    windows = Windows(stream_of(10, 11, 12, 13, 14, 15), 3)
    inputs, targets = windows.gather(torch.tensor([1]))
    assert inputs[0, :2].tolist() == [13, 14]
    assert targets.tolist() == [[14, 15, NO_TARGET]]
    inputs, targets = Windows(stream_of(10, 11, 12, 13, 14), 3).gather(torch.tensor([0, 1]))
    assert inputs[:, 0].tolist() == [10, 13]
    assert targets.tolist() == [[11, 12, 13], [14, NO_TARGET, NO_TARGET]]


def test_the_target_that_counts_for_nothing_is_the_one_torch_leaves_out() -> None:
    logits = torch.randn(2, 5)
    both = torch.nn.functional.cross_entropy(logits, torch.tensor([3, NO_TARGET]), reduction="sum")
    assert both == torch.nn.functional.cross_entropy(logits[:1], torch.tensor([3]), reduction="sum")


@pytest.mark.parametrize("block_size", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("length", range(2, 23))
def test_each_token_but_the_first_is_predicted_exactly_once_from_the_one_before(length: int, block_size: int) -> None:
    windows = Windows(stream_of(*range(100, 100 + length)), block_size)
    inputs, targets = windows.gather(torch.arange(len(windows)))
    assert inputs.shape == targets.shape == (len(windows), block_size)
    asked = targets != NO_TARGET
    assert targets[asked].tolist() == list(range(101, 100 + length))
    assert torch.equal(inputs[asked] + 1, targets[asked])
    assert asked.any(dim=1).all()  # no window asks nothing


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (7, 2), (8, 3)])
def test_lengths(length: int, expected: int) -> None:
    assert len(Windows(stream_of(*range(length)), 3)) == expected


def test_a_batch_does_not_depend_on_what_else_is_in_it() -> None:
    windows = Windows(stream_of(*range(20, 31)), 4)
    whole = windows.gather(torch.arange(3))
    for place in range(3):
        alone = windows.gather(torch.tensor([place]))
        assert torch.equal(alone[1], whole[1][place : place + 1])
        asked = alone[1] != NO_TARGET
        assert torch.equal(alone[0][asked], whole[0][place : place + 1][asked])


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    windows = Windows(stream_of(1, 2, 3, 4, 99, 6, 7), 3, vocab_size=99)
    assert windows.gather(torch.tensor([0]))[1].tolist() == [[2, 3, 4]]
    with pytest.raises(UsageError, match=r"data\.vocab_size: the data holds token 99, but vocab_size is 99"):
        windows.gather(torch.tensor([1]))
    assert Windows(stream_of(1, 2, 3, 4, 99, 6, 7), 3, vocab_size=100).gather(torch.tensor([1]))[0][0, 1] == 99


def test_a_token_that_is_only_a_target_is_looked_at_too() -> None:
    with pytest.raises(UsageError, match="holds token 99"):
        Windows(stream_of(1, 2, 3, 99), 3, vocab_size=50).gather(torch.tensor([0]))


def test_a_file_of_little_endian_words_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(bytes([1, 0, 2, 0, 0, 1, 255, 255]))
    windows = Windows.open(str(path), 3, 65536)
    assert windows.gather(torch.tensor([0]))[0].tolist() == [[1, 2, 256]]
    assert windows.gather(torch.tensor([0]))[1].tolist() == [[2, 256, 65535]]


@pytest.mark.parametrize("size", [0, 2, 5])
def test_a_file_that_holds_no_two_words_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"\x00" * size)
    with pytest.raises(UsageError, match=f"{path} has {size} bytes: not a file of uint16 tokens"):
        Windows.open(str(path), 3, 10)


@pytest.mark.parametrize("size", [10, 65536, 200_000, 80_000_000])
def test_fingerprints_see_size_first_and_last_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)  # a large one is sparse: no disk is filled
    prints = [fingerprint(str(path)), fingerprint(str(path))]
    for place in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\x01")
        prints.append(fingerprint(str(path)))
    with path.open("ab") as file:
        file.truncate(size + 1)
    prints.append(fingerprint(str(path)))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    assert prints[0].startswith(f"{size}:")


@pytest.mark.parametrize("place", range(0, 1_000_000, 99_991))
def test_any_byte_of_a_small_file_changes_its_fingerprint(tmp_path: Path, place: int) -> None:
    path = tmp_path / "file"
    content = bytearray(1_000_000)
    path.write_bytes(content)
    before = fingerprint(str(path))
    content[place] = 1
    path.write_bytes(content)
    assert fingerprint(str(path)) != before
