"""Who is the culprit and who a victim, and in which words: what a rank says of its own end."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from train.collective_errors import in_words
from train.errors import (
    CheckpointError,
    ContactError,
    JoinError,
    MusterError,
    NonFiniteError,
    ReplicaError,
    UsageError,
    WaitError,
)
from train.failure import Failure, failure_of
from train.seam import Phase


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (UsageError("x"), "usage", 2),
        (JoinError("x"), "join", 4),
        (ContactError("x"), "collective", 5),
        (WaitError("x"), "hang", 6),
        (NonFiniteError("x"), "exception", 5),
        (ReplicaError("x"), "exception", 5),
        (CheckpointError("x"), "exception", 5),
        (MusterError("x"), "exception", 5),
        (KeyboardInterrupt(), "interrupted", 8),
        (ValueError("x"), "exception", 5),
        (torch.OutOfMemoryError("CUDA out of memory"), "exception", 5),
        (SystemExit(3), "exception", 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_error_has_its_kind_and_code(error: BaseException, kind: str, exit_code: int) -> None:
    assert failure_of(error)[:2] == (kind, exit_code)


def test_words_of_an_expected_failure_are_its_own() -> None:
    assert failure_of(UsageError(["a: b", "c: d"])).words == "a: b\nc: d"
    assert failure_of(WaitError("waited")).words == "waited"


def raised(error: BaseException) -> Failure:
    """What becomes of an error raised on the line below."""
    try:
        raise error
    except BaseException as caught:
        return failure_of(caught)


LINE = raised.__code__.co_firstlineno + 3


def test_an_exception_is_told_in_one_line_with_the_place() -> None:
    assert raised(ValueError("one\ntwo")).words == f"ValueError: one at {__file__}:{LINE}"
    assert raised(ZeroDivisionError()).words == f"ZeroDivisionError at {__file__}:{LINE}"
    assert len(raised(ValueError("x" * 5000)).words) < 1000
    assert failure_of(ValueError("never raised")).words == "ValueError: never raised"


def test_the_place_is_the_user_s_not_torch_s_nor_python_s() -> None:
    for call in (lambda: torch.nn.functional.layer_norm(torch.zeros(2), [3]), lambda: json.loads("{")):
        try:
            call()
        except Exception as error:
            assert error.__traceback__ is not None
            assert failure_of(error).words.endswith(f" at {__file__}:{call.__code__.co_firstlineno}")


class Broken(Dataset[int]):
    """Fails in a data-loader worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError("sample 3")


def test_an_error_in_a_data_loader_worker_is_told_as_it_was_there() -> None:
    try:
        list(DataLoader(Broken(), num_workers=1))
    except KeyError as error:
        line = Broken.__getitem__.__code__.co_firstlineno + 1
        assert failure_of(error).words == f"KeyError: 'sample 3' at {__file__}:{line}"
    else:
        raise AssertionError("nothing was raised")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("phase", "option"),
    [
        (Phase.STARTING, "save_timeout_s"),
        (Phase.FIRST_STEP, "first_step_timeout_s"),
        (Phase.STEP, "step_timeout_s"),
        (Phase.EVALUATION, "eval_timeout_s"),
        (Phase.SAVING, "save_timeout_s"),
        (Phase.ENDING, "save_timeout_s"),
    ],
)
def test_a_collective_that_timed_out_names_the_phase_s_own_option(phase: Phase, option: str) -> None:
    with pytest.raises(WaitError) as caught, in_words("rank 1 (b)", lambda: (phase, "in step 7")):
        raise RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete")
    assert str(caught.value).startswith("rank 1 (b) waited in vain for other ranks in step 7")
    assert f"(a longer wait: --runtime.{option})" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:4242"),
        RuntimeError("NCCL error in: x.cpp:77, remote process exited or there was a network error"),
        dist.DistBackendError("anything"),
    ],
)
def test_a_lost_connection_makes_a_victim(error: RuntimeError) -> None:
    with pytest.raises(ContactError) as caught, in_words("rank 1 (b)", lambda: (Phase.STEP, "in step 7")):
        raise error
    assert str(caught.value).startswith("rank 1 (b) lost contact with another rank in step 7")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("connection reset by peer while reading shard 7"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.OutOfMemoryError("CUDA out of memory, and NCCL wanted some too"),
        ValueError("gloo/"),
    ],
)
def test_what_a_rank_did_wrong_itself_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, in_words("rank 1 (b)", lambda: (Phase.STEP, "in step 7")):
        raise error
    assert caught.value is error


def test_ranks_that_went_different_ways_are_no_victims() -> None:
    words = f"[enforce fail at {GLOO[1:]}pair.cc:459] op.preamble.length <= op.nbytes. 20 vs 16"
    with pytest.raises(MusterError) as caught, in_words("rank 1 (b)", lambda: (Phase.STEP, "in step 7")):
        raise RuntimeError(words)
    assert failure_of(caught.value).kind == "exception"
    assert "different amounts of data" in str(caught.value)
