"""What a failed collective means for its user: the rank that reports it is the victim, not the culprit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from train.errors import ContactError, MusterError, WaitError
from train.seam import Phase

# Gloo's errors begin with its source file, but for this one: another collective's time-out has closed the connection.
_OF_A_COLLECTIVE = re.compile(r"gloo[/:]|\bnccl|Application timeout caused pair closure", re.IGNORECASE)
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)


_TIMEOUTS = {
    Phase.STARTING: "save_timeout_s", Phase.FIRST_STEP: "first_step_timeout_s", Phase.STEP: "step_timeout_s",
    Phase.EVALUATION: "eval_timeout_s", Phase.SAVING: "save_timeout_s", Phase.ENDING: "save_timeout_s",
}  # fmt: skip
"""The time-outs of the groups that a phase uses."""


@contextmanager
def in_words(who: str, doing: Callable[[], tuple[Phase, str]]) -> Iterator[None]:
    """Turn the error of a collective into words for the user; `doing` tells the phase, and when, in words.

    Only what says that another rank is gone or late: what this rank itself did wrong passes as it is.
    """
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        text = str(error)
        if "Expected to have finished reduction" in text:
            raise MusterError(
                "a parameter got no gradient in the last step, which ddp must know of: set "
                "--strategy.find_unused_parameters true, or use all parameters in every step"
            ) from error
        if "op.preamble.length" in text:
            raise MusterError(
                f"{who} and another rank met in one collective with different amounts of data: the ranks have gone "
                "different ways, by a branch on the rank or by shapes that differ between them"
            ) from error
        is_of_a_collective = isinstance(error, dist.DistError) or _OF_A_COLLECTIVE.search(text)
        if isinstance(error, torch.OutOfMemoryError) or not is_of_a_collective:
            raise
        phase, when = doing()
        if _TIMED_OUT.search(text):
            raise WaitError(
                f"{who} waited in vain for other ranks {when}: one of them hangs, or its host is cut off; "
                f"their logs tell which (a longer wait: --runtime.{_TIMEOUTS[phase]})"
            ) from error
        raise ContactError(
            f"{who} lost contact with another rank {when}: that one ended first, its log tells why"
        ) from error
