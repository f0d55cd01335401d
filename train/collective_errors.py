"""What a failed collective means for its user: the rank that reports it is the victim, not the culprit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from train.errors import ContactError, MusterError, WaitError
from train.runtime import Runtime

_OF_A_COLLECTIVE = re.compile("gloo|nccl|connection (closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)


@contextmanager
def in_words(runtime: Runtime, when: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a collective into words for the user: it is the victim's, the culprit's log tells more."""
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
        who = f"rank {runtime.rank} ({runtime.host})"
        if _TIMED_OUT.search(text):
            raise WaitError(
                f"{who} waited in vain for other ranks {when()}: one of them hangs, or its host is cut off; "
                "their logs tell which (a longer wait: --runtime.step_timeout_s)"
            ) from error
        raise ContactError(
            f"{who} lost contact with another rank {when()}: that one ended first, its log tells why"
        ) from error
