"""What must be the same in two runs of one training: weights, rows and samples, to the last bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from train.errors import CheckpointError


class NotTheSameError(Exception):
    """The proof has failed: what differs."""


def compare(one: Path, other: Path, ranks: int) -> None:
    """Final state, rows and samples of two runs. Raises NotTheSameError."""
    if weights_hash(one) != weights_hash(other):
        raise NotTheSameError(f"the final checkpoints of {one.name} and {other.name} differ")
    if _rows(one) != _rows(other):
        raise NotTheSameError(f"the rows of metrics.jsonl of {one.name} and {other.name} differ")
    for rank in range(ranks):
        if _samples(one, rank) != _samples(other, rank):
            raise NotTheSameError(f"rank {rank} did not see the same samples in {one.name} and {other.name}")
    count_samples(other, ranks)


def count_samples(run: Path, ranks: int) -> tuple[int, int]:
    """(samples, whole epochs) that a run has seen; each sample of an epoch once. Raises NotTheSameError."""
    from train.options import read_config

    config = read_config(["--config", str(run / "config.yaml")])
    seen: dict[int, list[int]] = {}
    for rank in range(ranks):
        for step, ids in _samples(run, rank):
            seen.setdefault(step, []).extend(ids)
    total = json.loads((run / "environment.json").read_text())["training_samples"]
    per_epoch = total // config.batch.global_size if config.data.drop_last else -(-total // config.batch.global_size)
    if sorted(seen) != list(range(1, len(seen) + 1)):
        raise NotTheSameError(f"{run.name}: steps are missing among the samples' rows")
    epochs = len(seen) // per_epoch
    for epoch in range(-(-len(seen) // per_epoch)):
        steps = range(epoch * per_epoch + 1, min((epoch + 1) * per_epoch, len(seen)) + 1)
        counts = Counter(sample for step in steps for sample in seen[step])
        if max(counts.values()) > 1:
            raise NotTheSameError(f"{run.name}: sample {counts.most_common(1)[0][0]} came twice in epoch {epoch}")
        if epoch < epochs and not config.data.drop_last and len(counts) != total:
            raise NotTheSameError(f"{run.name}: epoch {epoch} had {len(counts)} of {total} samples")
    return sum(map(len, seen.values())), epochs


def weights_hash(run: Path) -> str:
    """SHA-256 of all that the newest checkpoint holds of weights, optimizer and scaler. Raises NotTheSameError."""
    from train.checkpoint import Checkpoints
    from train.fingerprint import hash_of

    try:
        newest = Checkpoints(run / "checkpoints", keep=1).newest()
    except CheckpointError as error:
        raise NotTheSameError(f"{run.name} ended with no checkpoint that can be read: {error}") from None
    if newest is None:
        raise NotTheSameError(f"{run.name} has no checkpoint")
    return hash_of({name: newest[0][name] for name in ("model", "optimizer", "scaler", "progress")})


def _samples(run: Path, rank: int) -> list[tuple[int, list[int]]]:
    return [(row["step"], row["ids"]) for row in _lines(run, f"samples/rank{rank}.jsonl")]


def _rows(run: Path) -> list[dict[str, Any]]:
    """Without what must differ: the times."""
    timed = ("time_s", "items_per_s")
    return [{k: v for k, v in row.items() if k not in timed} for row in _lines(run, "metrics.jsonl")]


def _lines(run: Path, name: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise NotTheSameError(f"{run.name} has no {name}") from None
    except ValueError as error:
        raise NotTheSameError(f"{run.name}: {name} has a line that is cut short: {error}") from None


def newest_step(run: Path) -> int:
    """Where a run stands, by its newest whole row; 0 where it has none yet."""
    try:
        return int(json.loads((run / "samples" / "rank0.jsonl").read_text().splitlines()[-2])["step"])
    except (OSError, ValueError, IndexError):
        return 0


def cause_of(run: Path) -> str | None:
    """Why it ended, by its verdict."""
    try:
        return str(json.loads((run / "verdict.json").read_text())["cause"])
    except (OSError, ValueError, KeyError):
        return None
