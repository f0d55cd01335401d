"""What an agent tells of its ranks beside their steps: memory, the last step's length, where their time went."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from train.launch.ranks import Rank, programs

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
_MOST_A_SECOND = 1000


def every_s(world_size: int) -> float:
    """Seconds between facts of the same rank: agent 0 must not drown in those of a large job."""
    return max(1.0, world_size / _MOST_A_SECOND)


def facts_of(rank: Rank) -> list[Any]:
    """Rank, its memory in MB, its last step in ms (0: none yet), ms that went into each `Activity` (empty: untold)."""
    times_ms: list[int] = []
    with contextlib.suppress(ValueError, OverflowError):  # no numbers: a rank may write anything on its page
        times_ms = [round(1000 * seconds) for seconds in rank.page.times_s(time.monotonic())]
    return [rank.rank, _memory_mb(rank), round(1000 * rank.step_s, 1), times_ms]


def _memory_mb(rank: Rank) -> int:
    """Resident memory of the rank's program, without its data workers."""
    if rank.code is not None:
        return 0
    pages = 0
    for pid in programs(rank.pid) if rank.is_shell else [rank.pid]:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * _PAGE_MB)
