"""Checkpoints beside the training: a step waits for a copy in memory alone, a thread takes that to the disk."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from train.checkpoint import Checkpoints, State, tensors_of
from train.errors import CheckpointError, NonFiniteError
from train.progress import log

MOST_FAILURES = 3
"""So many failed saves in a row end the run: it would only train on to lose more."""
_GUESSED_BYTES_A_S = 50e6
_NICENESS = 10


class Saver:
    """Rank 0's way to its checkpoints. One is written at a time."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        parameters: Collection[str],
        record: Callable[..., None] = lambda event, **facts: None,
        expected_bytes: int = 0,
    ) -> None:
        """
        Args:
            checkpoints: where they go.
            parameters: names in a state's `model` that must be finite; a buffer need not be.
            record: takes the event of each save, good or failed; called in the writing thread.
            expected_bytes: about how large a state will be; what is not known before the first save.
        """
        self.checkpoints = checkpoints
        self.saved_step = -1
        """The newest step that is on the disk, by this saver's doing."""
        self._parameters = parameters
        self._record = record
        self._expected_bytes = expected_bytes
        self._snapshot = Snapshot()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_step_back)
        self._writing: Future[None] | None = None
        self._failures = 0
        self._last_error: CheckpointError | NonFiniteError | None = None
        self._slowest_s: float | None = None
        self._began_s = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a save is on its way to the disk."""
        return self._writing is not None and not self._writing.done()

    @property
    def seconds(self) -> float:
        """How long a save may take, from copy to disk: the slowest one yet, be it still at it; a guess before that."""
        so_far_s = time.perf_counter() - self._began_s if self.is_writing else 0.0
        if self._slowest_s is not None:
            return max(self._slowest_s, so_far_s)
        return max(1.0 + max(self._expected_bytes, self._snapshot.bytes) / _GUESSED_BYTES_A_S, so_far_s)

    def save(self, step: int, state: State, patience_s: float | None = None) -> bool:
        """Take a copy and have it written.

        Args:
            step: the state's.
            state: live tensors, on any device; they may change as soon as this returns.
            patience_s: how long to wait for the save before, if that is still being written; None: as long as it takes.

        Returns:
            False where it is still being written after that: this step is not saved.

        Raises:
            NonFiniteError: the save before found weights that are no numbers.
            CheckpointError: the third one in a row has failed.
        """
        began_s = time.perf_counter()
        if self._writing is not None and wait([self._writing], patience_s).not_done:
            log.warning(
                f"step {step} is not saved: the save before is still being written after {patience_s:g} s; "
                "save less often (train.save_every), or to a faster disk"
            )
            self._record("save skipped", step=step)
            return False
        if self._writing is not None:
            self._writing.result()  # what nobody foresaw is not to pass unheard
        self._raise_what_ends_the_run()
        snapshot = self._snapshot.take(state)
        stall_s = time.perf_counter() - began_s
        self._began_s = began_s
        self._writing = self._writer.submit(self._write, step, snapshot, stall_s)
        return True

    def wait(self) -> bool:
        """Until nothing is being written; whether the newest save is good. Raises as `save` does."""
        if self._writing is not None:
            self._writing.result()
        self._raise_what_ends_the_run()
        return self._last_error is None

    def settle(self, timeout_s: float) -> None:
        """The run has failed: a save that is nearly through may still come to its end."""
        if self._writing is not None:
            wait([self._writing], timeout_s)

    def _raise_what_ends_the_run(self) -> None:
        if isinstance(self._last_error, NonFiniteError):
            raise self._last_error
        if self._last_error is not None and self._failures >= MOST_FAILURES:
            raise CheckpointError(f"{self._failures} saves in a row have failed; the last: {self._last_error}")

    def _write(self, step: int, snapshot: State, stall_s: float) -> None:
        """In the thread of its own."""
        began_s = time.perf_counter()
        try:
            refuse_non_finite(step, {name: snapshot["model"][name] for name in self._parameters})
            self.checkpoints.save(step, snapshot)
        except NonFiniteError as error:
            self._last_error = error
        except CheckpointError as error:
            self._last_error = error
            self._failures += 1
            log.warning(f"{error}; older checkpoints stay, training goes on ({self._failures} of {MOST_FAILURES})")
            self._record("save failed", step=step, why=str(error))
        else:
            self._last_error, self._failures, self.saved_step = None, 0, step
            seconds = stall_s + time.perf_counter() - began_s
            self._slowest_s = max(seconds, self._slowest_s or 0.0)
            self._record(
                "saved", step=step, seconds=round(seconds, 3), stall_s=round(stall_s, 4), bytes=self._snapshot.bytes
            )


class Snapshot:
    """A state's copy in host memory, which is used again for the next: fresh memory costs several times the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._taken: dict[tuple[Any, ...], torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Size of the copy taken last."""
        return sum(buffer.nbytes for buffer in {id(buffer): buffer for buffer in self._taken.values()}.values())

    def take(self, state: State) -> State:
        """The same structure, with tensors of its own: those of the copy before, where the shapes have stayed."""
        self._taken = {}
        before, self._buffers = self._buffers, {}
        found: State = self._copy(state, (), before)
        if any(tensor.is_cuda for tensor in tensors_of(state)):
            torch.cuda.current_stream().synchronize()  # the copies were only queued
        return found

    def _copy(self, value: Any, path: tuple[str, ...], before: dict[tuple[str, ...], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach(), path, before)
        if isinstance(value, dict):
            copied = copy.copy(value)  # of its own kind and with its attributes: state_dict() has one
            for key, entry in value.items():
                copied[key] = self._copy(entry, (*path, str(key)), before)
            return copied
        if isinstance(value, list | tuple):
            return type(value)(self._copy(entry, (*path, str(i)), before) for i, entry in enumerate(value))
        return value

    def _copy_tensor(
        self, tensor: torch.Tensor, path: tuple[str, ...], before: dict[tuple[str, ...], torch.Tensor]
    ) -> torch.Tensor:
        # Tied weights are one tensor under two names, and stay one.
        alias = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else path
        if alias in self._taken:
            return self._taken[alias]
        buffer = before.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=True)
        self._buffers[path] = self._taken[alias] = buffer
        return buffer


def refuse_non_finite(step: int, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise NonFiniteError rather than keep weights that are NaN: the last good checkpoint stays the newest."""
    for name, tensor in parameters.items():
        suspect = not torch.isfinite(tensor.detach().sum())  # the sum alone may also overflow
        if suspect and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{name} is not finite after step {step}: not saved")


def _step_back() -> None:
    """The writing thread yields to the training where cores are scarce (setpriority(2) is by thread on Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
