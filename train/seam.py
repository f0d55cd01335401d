"""What the launch plane and the training plane share: exit codes and environment names.

Standard library only. This is the one module that both planes may import.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of a rank, and of everything that launches one."""

    FINISHED = 0
    BUG = 1  # Muster's own
    USAGE = 2  # bad config, environment or data: nothing was trained
    NEVER_JOINED = 4  # a rank or a host did not come
    RANK_FAILED = 5  # an exception, a non-finite loss, replicas that differ
    HANG = 6  # the other ranks did not come to a step's collective in time
    STOPPED_UNSAVED = 8  # stopped, and what came after the last checkpoint is lost
    STOPPED_SAVED = 75  # stopped on request with a good checkpoint: run it again to go on


RUN_ID = "MUSTER_RUN_ID"  # the run's name; survives restarts
RUNS_DIR = "MUSTER_RUNS_DIR"  # the folder that holds the run folders
