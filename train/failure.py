"""Why a rank ends, in the words and kinds that its node agent judges by: who is the culprit, who a victim.

Kinds: `usage` (refused, nothing was trained), `join` (others never came), `collective` (another rank is gone),
`hang` (waited in vain for another), `interrupted` (ended at once on request), `exception` (this rank's own).
Free of torch.
"""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

from train.errors import ContactError, JoinError, MusterError, UsageError, WaitError
from train.evidence import is_foreign
from train.seam import Exit

INTERRUPTED = "interrupted: what came after the last checkpoint is lost; the same command goes on from there"
_LONGEST = 600
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


class Failure(NamedTuple):
    """One rank's end."""

    kind: str
    exit_code: Exit
    words: str
    """For its user: a line, of refusals one a problem."""


def failure_of(error: BaseException) -> Failure:
    """What an error means to those outside this rank."""
    if isinstance(error, MusterError):
        kinds = ((UsageError, "usage"), (JoinError, "join"), (ContactError, "collective"), (WaitError, "hang"))
        kind = next((kind for type_, kind in kinds if isinstance(error, type_)), "exception")
        return Failure(kind, error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", Exit.STOPPED_UNSAVED, INTERRUPTED)
    return Failure("exception", Exit.RANK_FAILED, _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    """`ValueError: words at file:line`, where the line is the innermost one that is not torch's or Python's own."""
    text = str(error)
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    name = type(error).__name__
    # A data-loader worker's error comes with the worker's traceback as its message; what was said is its last line.
    if "Original Traceback" in text:
        frames = [(match["file"], int(match["line"])) for match in _FRAME.finditer(text)]
        name, _, text = text.strip().splitlines()[-1].partition(": ")
    said = text.strip().splitlines()[0] if text.strip() else ""
    place = next((frame for frame in reversed(frames) if not is_foreign(frame[0])), frames[-1] if frames else None)
    where = f" at {place[0]}:{place[1]}" if place else ""
    return f"{name}{': ' if said else ''}{said[:_LONGEST]}{where}"
