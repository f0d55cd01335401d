"""Errors that end a rank with words for its user instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterable

from train.seam import Exit


class MusterError(Exception):
    """An expected failure: its message says what was given, what was found and the fix."""

    exit_code = Exit.RANK_FAILED


class UsageError(MusterError):
    """A bad config, environment or data set. Carries every problem found, not only the first."""

    exit_code = Exit.USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class JoinError(MusterError):
    """Some ranks never came."""

    exit_code = Exit.NEVER_JOINED


class NonFiniteError(MusterError):
    """The loss or the weights are NaN or infinite."""


class ReplicaError(MusterError):
    """The ranks no longer hold the same parameters."""


class WaitError(MusterError):
    """The other ranks did not answer within the time-out of a step, an evaluation or a save."""

    exit_code = Exit.HANG


class ContactError(MusterError):
    """Another rank ended in the middle of a step."""


class CheckpointError(MusterError):
    """A checkpoint cannot be written, or is damaged."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now, and may be good: no reason to take an older one."""
