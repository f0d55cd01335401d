"""Any log, however large, ill-formed or mixed: the lines that known failures left, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from train.launch.signatures import LONGEST_LINE, Finding, Kind, find, signatures, unknown
from train.launch.tracebacks import MARKS, Raised, Reader, Standing, start_of
from train.seam import LOG_ONLY

_BLOCK_BYTES = 1 << 20
_OVERLAP_BYTES = 256
_MOST_FINDINGS = 10_000
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENQUEUED = "last enqueued NCCL work"
_NCCL_STATE = re.compile(r"\[(?P<group>PG[^\]]*?) ?Rank (?P<rank>\d+)\].*last enqueued NCCL work: (?P<enqueued>\d+)")

_WHO = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?P<host>\S+) rank (?P<rank>\d+) \| ",  # the console of our own agent, on several hosts
        r"^rank (?P<rank>\d+) \| ",
        r"\[rank(?P<rank>\d+)\]:",  # PyTorch 2.2 on
        r"\[Rank (?P<rank>\d+)\]",
        r"^\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:",  # mpirun --tag-output
        r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)\b",
        r"^(?P<host>[\w.-]+):\d+:\d+ \[\d+\] ",  # NCCL_DEBUG
        r"^(?P<host>[\w.-]+?)(?:[-_]1)? +\| ",  # docker compose
        r"^ *(?P<rank>\d+): ",  # srun --label
        r"^(?P<host>[a-z][a-z.-]*\d[\w.-]*): ",  # pdsh and the like
    )
)
_TIME = re.compile(r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: |$)")
_STARTS = [mark.encode() for mark in MARKS]
_MOST_AT_ONCE, _MOST_BETWEEN = 256, 200
_OF_A_VICTIM = re.compile(r"torch\.distributed\.(?:Dist\w+Error|elastic\.)|KeyboardInterrupt")
_WHO_BY_PATH = re.compile(r"node\d+-(?P<host>[^/]+)/rank(?P<rank>\d+)\.log$|rank(?P<rank2>\d+)\.\w+$")


@dataclass(frozen=True)
class Located:
    """A finding, and where it was first met."""

    finding: Finding
    file: str
    number: int
    """Line, from 1."""
    rank: int | None
    host: str | None

    @property
    def who(self) -> str:
        """`rank 3 (node1)`, as far as the line tells."""
        if self.rank is None:
            return self.host or ""
        return f"rank {self.rank} ({self.host})" if self.host else f"rank {self.rank}"


@dataclass
class Scan:
    """What was found in one or more logs."""

    counts: dict[Located, int] = field(default_factory=dict)
    """Each failure of each rank where it was met first, with how often it was met."""
    enqueued: dict[str, dict[int, int]] = field(default_factory=dict)
    """For each of NCCL's groups: the last collective that each rank had begun."""
    _first: dict[tuple[str, str, int | None, str | None], Located] = field(default_factory=dict)

    def read(self, stream: BinaryIO, file: str) -> None:
        """Look through a log. Raises OSError."""
        tracebacks = _Tracebacks()
        for number, line in lines_with_marks(stream, tracebacks):
            self._note_state(line)
            found = find(line)
            if found is not None:
                self._note(found, file, number, line)
        tracebacks.finish()
        for raised, prefix in tracebacks.raised:
            self._note_raised(raised, prefix, file)

    def _note(self, found: Finding, file: str, number: int, line: str) -> None:
        rank, host = who_of(line)
        by_path = _WHO_BY_PATH.search(file)
        if by_path:
            rank = int(by_path["rank"] or by_path["rank2"]) if rank is None else rank
            host = host or by_path["host"]
        name = found.cause if found.signature.is_unknown else found.signature.name
        key = (name, file, rank, host)
        if key not in self._first and len(self._first) < _MOST_FINDINGS:
            self._first[key] = Located(found, file, number, rank, host)
        first = self._first.get(key)
        if first is not None:
            self.counts[first] = self.counts.get(first, 0) + 1

    def _note_raised(self, raised: Raised, prefix: str, file: str) -> None:
        """What a traceback ended with, unless it is known better, or only tells that something else ended."""
        if raised.standing is Standing.IGNORED or "ChildFailedError" in raised.text or find(raised.text) is not None:
            return
        kind: Kind = "collective" if _OF_A_VICTIM.match(raised.text) else "exception"
        is_weak = raised.standing is Standing.ASIDE
        found = unknown(f"it raised {raised.words}", raised.text, kind, is_weak=is_weak)
        self._note(found, file, raised.number, f"{prefix} {raised.text}")

    def findings(self, first_rank: int | None = None) -> list[Located]:
        """The most probable cause first: causes before victims, then those of `first_rank`, then as they came."""
        files = {file: index for index, file in enumerate(dict.fromkeys(at.file for at in self.counts))}
        return sorted(
            self.counts,
            key=lambda at: (at.finding.signature.order, at.rank != first_rank, files[at.file], at.number),
        )

    def behind(self) -> str | None:
        """Which rank the others waited for, if NCCL's reports tell."""
        for ranks in self.enqueued.values():
            low, high = min(ranks.values()), max(ranks.values())
            late = sorted(rank for rank, number in ranks.items() if number == low)
            if low < high and len(late) < len(ranks):
                return (
                    f"rank {_listed(late)} had begun collective #{low} when others had begun #{high}: "
                    "it is behind, its log tells where it is"
                )
            silent = sorted(set(range(max(ranks) + 1)) - set(ranks))
            if silent and len(silent) < len(ranks):
                return (
                    f"rank {_listed(silent)} reported nothing while the others timed out: it hangs, or was gone before"
                )
        return None

    def _note_state(self, line: str) -> None:
        found = _NCCL_STATE.search(line) if _ENQUEUED in line else None
        if found:
            rank = who_of(line)[0]
            ranks = self.enqueued.setdefault(found["group"], {})
            ranks.setdefault(int(found["rank"]) if rank is None else rank, int(found["enqueued"]))


class _Tracebacks:
    """Tracebacks of a log: each has lines of its own prefix, and several ranks write at a time."""

    def __init__(self) -> None:
        self.raised: list[tuple[Raised, str]] = []
        """What they ended with, and the prefix of its line."""
        self._readers: dict[str, Reader] = {}
        self._fed: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether lines without a mark count too."""
        return bool(self._readers)

    def feed(self, line: str, number: int) -> None:
        """Take a line: all that have a mark, and while it is open all."""
        line = _TIME.sub("", line)
        for prefix in [prefix for prefix, fed in self._fed.items() if number - fed > _MOST_BETWEEN]:
            self._close(prefix)
        own = max((prefix for prefix in self._readers if line.startswith(prefix)), key=len, default=None)
        start = start_of(line)
        if start >= 0 and (own is None or not self._readers[own].is_in_group(line[len(own) :])):
            own = line[:start].rstrip()
            if own not in self._readers and len(self._readers) < _MOST_AT_ONCE:
                self._readers[own] = Reader()
        if own is None or own not in self._readers:
            return
        self._note(self._readers[own].feed(line[len(own) :], number), own)
        self._fed[own] = number
        if not self._readers[own].is_open:
            self._close(own)

    def finish(self) -> None:
        """No more lines come."""
        for prefix in list(self._readers):
            self._close(prefix)

    def _close(self, prefix: str) -> None:
        self._fed.pop(prefix, None)
        self._note(self._readers.pop(prefix).finish(), prefix)

    def _note(self, raised: Raised | None, prefix: str) -> None:
        if raised is not None and len(self.raised) < _MOST_FINDINGS:
            self.raised.append((raised, prefix))


def lines_with_marks(stream: BinaryIO, also: _Tracebacks | None = None) -> Iterator[tuple[int, str]]:
    """Lines that may be of interest, with their numbers. Holds two megabytes at most, whatever the lines' lengths.

    Args:
        stream: the log.
        also: takes all lines that tracebacks may be made of; those have no marks.
    """
    marks = [mark.encode() for signature in signatures() for mark in signature.marks]
    marks.append(_ENQUEUED.encode())
    number, rest = 1, b""
    while block := stream.read(_BLOCK_BYTES):
        data = rest + block
        # A progress bar ends its lines with a carriage return: a failure may stand behind megabytes of those.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _BLOCK_BYTES:
            end = len(data) - _OVERLAP_BYTES
        yield from _marked(data[:end], number, marks, also)
        number += data.count(b"\n", 0, end)
        rest = data[end:]
    yield from _marked(rest, number, marks, also)


def _marked(data: bytes, number: int, marks: Iterable[bytes], also: _Tracebacks | None) -> Iterator[tuple[int, str]]:
    present = [mark for mark in marks if mark in data]  # a search in a whole block is many times faster than in lines
    starts = [mark for mark in _STARTS if mark in data] if also else []
    if not present and not starts and not (also and also.is_open):
        return
    for offset, line in enumerate(data.split(b"\n")):
        for piece in line.split(b"\r"):
            at = min((place for mark in present if (place := piece.find(mark)) >= 0), default=-1)
            is_fed = also is not None and (also.is_open or any(mark in piece for mark in starts))
            if at >= 0 or is_fed:
                start = max(0, at - LONGEST_LINE // 2) if len(piece) > LONGEST_LINE else 0
                text = piece[start : start + LONGEST_LINE].decode("utf-8", errors="replace")
                text = _COLOUR.sub("", text).removeprefix(LOG_ONLY)
                if is_fed and also:
                    also.feed(text, number + offset)
                if at >= 0:
                    yield number + offset, text


def who_of(line: str) -> tuple[int | None, str | None]:
    """Rank and host that a line is from, where it tells."""
    rank: int | None = None
    host: str | None = None
    for pattern in _WHO:
        found = pattern.search(line)
        if found:
            told = found.groupdict()
            rank = int(told["rank"]) if rank is None and told.get("rank") else rank
            host = host or told.get("host")
    return rank, host


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
