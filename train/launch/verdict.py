"""Failures, and which of them was the cause: one verdict in plain words."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from train.launch.signatures import diagnose
from train.launch.tracebacks import LONGEST, last_words, plain
from train.seam import Exit

EVIDENCE_LINES = 12


class Kind(IntEnum):
    """Kinds of failures; of several within a second, the lowest is the cause, and of equals the first."""

    NEVER_JOINED = 0
    SIGNAL = 1
    HOST_LOST = 2
    EXCEPTION = 3
    HANG = 4
    VICTIM = 5  # it failed because another rank, or the way to it, was gone


@dataclass(frozen=True)
class Failure:
    """Something that ends the job."""

    kind: Kind
    at_s: float
    """On agent 0's clock."""
    words: str
    """A full sentence with rank and host."""
    exit_code: Exit = Exit.RANK_FAILED
    host: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    step: int | None = None
    evidence: Sequence[str] = ()
    """Last lines of that rank's log, or its stack."""
    advice: str | None = None
    refusal: str | None = None
    """Why a rank of ours did not start: other ranks may have refused in the same words."""


@dataclass(frozen=True)
class Verdict:
    """How a start ended; `verdict.json`."""

    outcome: str
    """`finished`, `stopped` or `failed`."""
    exit_code: int
    cause: str | None
    host: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    step: int | None = None
    evidence: list[str] = field(default_factory=list)
    advice: str | None = None
    start_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The last line on the console."""
        said = self.cause or (f"{self.outcome}: step {self.step}" if self.step else self.outcome)
        return f"{said}: {self.advice}" if self.advice else said


def cause_of(failures: Iterable[Failure]) -> Failure:
    """The failure that the others followed from."""
    return min(failures, key=lambda failure: (failure.kind, failure.at_s))


def verdict_of(failure: Failure, start_id: str | None = None) -> Verdict:
    """What the job's end is to be put down to."""
    return Verdict(
        outcome="stopped" if failure.exit_code == Exit.STOPPED_UNSAVED else "failed",
        exit_code=int(failure.exit_code),
        cause=failure.words,
        host=failure.host,
        node_rank=failure.node_rank,
        rank=failure.rank,
        step=failure.step,
        evidence=list(failure.evidence)[-EVIDENCE_LINES:],
        advice=failure.advice,
        start_id=start_id,
    )


def failure_of_rank(end: Mapping[str, Any], host: str, node_rank: int, now_s: float) -> Failure:
    """A rank's end as its agent told it, judged.

    Args:
        end: `rank`, `code` (minus the signal's number, as subprocess has it), `step` (None: unknown),
            `oom` (the kernel killed something of its control group for want of memory), `told` (failure.json of
            our own ranks, else None), `lines` (last of its log).
        host: the rank's.
        node_rank: the host's.
        now_s: agent 0's clock.
    """
    code, told, lines = int(end["code"]), end.get("told"), list(end["lines"])
    who = f"rank {end['rank']} ({host}{gpu_words(end)})"
    when = f" at step {end['step']}" if end["step"] else ""
    found = diagnose(lines)
    if found is not None and found.signature.is_weak:
        found = None  # what is also seen where nothing is wrong is no cause of this
    kind, exit_code, advice = Kind.EXCEPTION, Exit.RANK_FAILED, found.advice if found else None
    is_victim = found is not None and found.kind == "collective"
    if told is not None:  # also where a signal ended it then: Gloo's threads may abort what has failed already
        kind = {"collective": Kind.VICTIM, "hang": Kind.HANG}.get(told["kind"], Kind.EXCEPTION)
        if told["kind"] in ("usage", "join", "hang", "interrupted"):
            exit_code = Exit(told["exit_code"])
        # Some words name the rank themselves.
        is_named = told["words"].startswith(f"rank {end['rank']} ")
        words = told["words"] if is_named else f"{who} failed{when}: {told['words']}"
        if told["kind"] == "interrupted":
            words = f"{who}{when}: {told['words']}"
        if told["kind"] == "usage":
            words, advice = f"{who} refused to start: {told['words']}", None
    elif code < 0:
        kind = Kind.VICTIM if is_victim and -code == signal.SIGABRT else Kind.SIGNAL
        words, advice = _killed(who + " was killed by", when, -code, end, found.cause if found else None, advice)
    elif is_victim:
        kind, words = Kind.VICTIM, f"{who} lost contact with another rank{when}: {_said(lines, code)}"
    else:
        words = f"{who} failed{when}: {_said(lines, code)}"
    if end.get("oom") and kind is Kind.EXCEPTION and _WORKER_KILLED.search(words):
        words, advice = f"{words}: {_OUT_OF_MEMORY}", _LESS_MEMORY
    refusal = told["words"] if told is not None and told["kind"] == "usage" else None
    return Failure(kind, now_s, words, exit_code, host, node_rank, end["rank"], end["step"], lines, advice, refusal)


def gpu_words(end: Mapping[str, Any]) -> str:
    """`, gpu 1` where the host has GPUs."""
    return f", gpu {end['gpu']}" if end.get("gpu") is not None else ""


def _killed(
    who: str, when: str, number: int, end: Mapping[str, Any], found: str | None, advice: str | None
) -> tuple[str, str | None]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    words = f"{who} signal {number} ({name}){when}"
    if end.get("oom") and number == signal.SIGKILL:
        return f"{words}: {_OUT_OF_MEMORY}", _LESS_MEMORY
    if found:
        return f"{words}: {found}", advice
    if number == signal.SIGKILL:
        return words, (
            "somebody or something on that host did it: the kernel for want of memory (`dmesg | grep -i oom`), "
            "the batch system, or a person"
        )
    if number in _FROM_OUTSIDE:
        return words, (
            "somebody or something outside that rank sent it: the batch system (a time limit, a preemption), another "
            "program on that host, or a person"
        )
    return words, advice or f"what it said last is in its log; `{name}` from within is a crash in native code"


_OUT_OF_MEMORY = "out of memory, the kernel says"
_LESS_MEMORY = "make batch.micro_size smaller (or the model), use fewer data workers, or give the job more memory"
_WORKER_KILLED = re.compile(
    r"is killed by signal: Killed|exited unexpectedly|terminated abruptly|<Signals\.SIGKILL: 9>"
)
_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def _said(lines: Sequence[str], code: int) -> str:
    """What a log says best of why a script failed: what it raised and where, its last line, or its status."""
    raised, rest = last_words([plain(line) for line in lines])
    if raised is not None:
        place = [raised.place] if raised.place else []
        more = ", ".join(place + ([f"status {code}"] if code != 1 else []))
        return f"{raised.text} ({more})" if more else raised.text
    said = _last_line(rest)
    if _LIKE_AN_EXCEPTION.match(said):
        return said if code == 1 else f"{said} (status {code})"
    status = f"it ended with status {code}"
    return f"{status}, and said last: {said}" if said and code in _TOLD_BY_PYTHON else status


def _last_line(lines: Sequence[str]) -> str:
    """The last line that a program said itself: no warning, nor what belongs to the line above it."""
    said, is_warning = "", False
    for line in lines:
        if line[:1].strip():
            is_warning = _WARNING.search(line) is not None
            said = said if is_warning else line.strip()[:LONGEST]
    return said


_TOLD_BY_PYTHON = (1, 2)
"""`sys.exit("words")`; a wrong option, or a script that is not there."""
_WARNING = re.compile(r"(?:^|[\s.])\w*Warning: ")
_LIKE_AN_EXCEPTION = re.compile(r"[^\W\d][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)(?:: |:?$)")
