"""What a failed collective means for its user: the rank that reports it is the victim, not the culprit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from train.errors import ContactError, MusterError, WaitError
from train.runtime import Phase, Runtime

_OF_A_COLLECTIVE = re.compile("gloo|nccl|connection (closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)


_TIMEOUTS: dict[Phase, str] = {"step": "step_timeout_s", "evaluation": "eval_timeout_s", "saving": "save_timeout_s"}


@contextmanager
def in_words(runtime: Runtime, doing: Callable[[], tuple[Phase, str]]) -> Iterator[None]:
    """Turn the error of a collective into words for the user; `doing` tells the phase, and when, in words."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        text = str(error)
        if "Expected to have finished reduction" in text:
            raise MusterError(
                "a parameter got no gradient in the last step, which ddp must know of: set "
                "--strategy.find_unused_parameters true, or use all parameters in every step"
            ) from error
        if not (isinstance(error, dist.DistError) or _OF_A_COLLECTIVE.search(text)):
            raise
        phase, when = doing()
        who = f"rank {runtime.rank} ({runtime.host})"
        if _TIMED_OUT.search(text):
            raise WaitError(
                f"{who} waited in vain for other ranks {when}: one of them hangs, or its host is cut off; "
                f"their logs tell which (a longer wait: --runtime.{_TIMEOUTS[phase]})"
            ) from error
        raise ContactError(
            f"{who} lost contact with another rank {when}: that one ended first, its log tells why"
        ) from error
