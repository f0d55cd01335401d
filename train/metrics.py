"""What a run leaves to be plotted: `metrics.jsonl` and TensorBoard files, by rank 0."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from train.progress import log


class Metrics:
    """Rows of one run; rows after the step a run goes on from are cut off."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool) -> None:
        """
        Args:
            folder: the run folder.
            after_step: the step the run goes on from; 0 for a new one.
            tensorboard: write TensorBoard files too, below `folder/tensorboard`.
        """
        path = folder / "metrics.jsonl"
        _cut_back(path, after_step)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._board: Any = None
        self._warned = False
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1 if after_step else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One row. A value that is no finite number becomes null: JSON has no other word for it."""
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._or_warn():
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        with self._or_warn():
            self._file.close()
        if self._board is not None:
            with self._or_warn():
                self._board.close()

    @contextmanager
    def _or_warn(self) -> Iterator[None]:
        """A full disk costs rows, not the run; said once."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                log.warning(f"cannot write metrics ({error}): rows are lost, training goes on")
            self._warned = True


class SampleLog:
    """Which samples a rank has seen: a row for each step, cut back like the metrics."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """
        Args:
            path: the rank's file.
            after_step: the step the run goes on from; later rows go.
        """
        path.parent.mkdir(exist_ok=True)
        _cut_back(path, after_step)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, ids: list[int]) -> None:
        """One step's."""
        self._file.write(json.dumps({"step": step, "ids": ids}) + "\n")


def _cut_back(path: Path, after_step: int) -> None:
    """Drop rows later than a step, and a last line cut short by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= after_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    aside.replace(path)
