"""Known failures by the lines that they leave in logs: what a line means, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["exception", "environment", "collective"]
"""The program's own fault; the machine's or its set-up; or the rank is a victim: another one ended or came late."""

LONGEST_LINE = 4000


@dataclass(frozen=True)
class Signature:
    """One known failure."""

    name: str
    kind: Kind
    marks: tuple[str, ...]
    """A line without any of these is not looked at closer: a search for plain text is cheap even in gigabytes."""
    cause: str
    """Plain words that complete `rank 3 failed: …`; `{name}` stands for a group of the pattern."""
    advice: str
    pattern: str | None = None
    """What the line must match; None: a mark suffices."""
    is_weak: bool = False
    """Also seen where nothing is wrong, or where another failure led to it."""
    is_unknown: bool = False
    """An exception of which nothing more is known."""

    @property
    def order(self) -> int:
        """Known causes (0) come before other exceptions (1), then what may be a cause (2), then victims (3)."""
        if self.kind == "collective":
            return 3
        return 2 if self.is_weak else int(self.is_unknown)

    def match(self, line: str) -> Finding | None:
        """What this signature says of a line."""
        if not any(mark in line for mark in self.marks):
            return None
        groups: dict[str, str] = {}
        if self.pattern is not None:
            found = re.search(self.pattern, line)  # re keeps it compiled
            if found is None:
                return None
            groups = found.groupdict("?")
        line = line.strip()
        return Finding(self, self.cause.format_map(groups), self.advice.format_map(groups), line)


class Finding(NamedTuple):
    """A known failure, found in a line."""

    signature: Signature
    cause: str
    advice: str
    line: str

    @property
    def kind(self) -> Kind:
        """Whose fault it is."""
        return self.signature.kind


def find(line: str) -> Finding | None:
    """What is known of a line: the first signature that fits, and they are sorted from special to general."""
    line = line[:LONGEST_LINE]
    return next((found for signature in signatures() if (found := signature.match(line))), None)


def unknown(words: str, line: str, kind: Kind, *, is_weak: bool) -> Finding:
    """An exception that ended a traceback, and that no signature knows."""
    advice = "the traceback there tells how it came to it"
    signature = Signature("exception", kind, (), words, advice, is_weak=is_weak, is_unknown=True)
    return Finding(signature, words, advice, line)


def diagnose(lines: Iterable[str]) -> Finding | None:
    """The most probable cause of one rank's failure, from lines of its log: causes before victims, then the first."""
    return first_cause(found for line in lines if (found := find(line)))


def first_cause(findings: Iterable[Finding]) -> Finding | None:
    """Of findings in the order of time, the one that the others probably followed from."""
    return min(findings, key=lambda finding: finding.signature.order, default=None)


@lru_cache(maxsize=1)
def signatures() -> Sequence[Signature]:
    """All that are known, from special to general."""
    from train.launch.signature_table import TABLE

    return TABLE
