"""Any log, however large, ill-formed or mixed: the lines that known failures left, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from train.launch.signatures import LONGEST_LINE, Finding, find, signatures
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
        by_path = _WHO_BY_PATH.search(file)
        for number, line in lines_with_marks(stream):
            self._note_state(line)
            found = find(line)
            if found is None:
                continue
            rank, host = who_of(line)
            if by_path:
                rank = int(by_path["rank"] or by_path["rank2"]) if rank is None else rank
                host = host or by_path["host"]
            key = (found.signature.name, file, rank, host)
            if key not in self._first and len(self._first) < _MOST_FINDINGS:
                self._first[key] = Located(found, file, number, rank, host)
            first = self._first.get(key)
            if first is not None:
                self.counts[first] = self.counts.get(first, 0) + 1

    def findings(self, first_rank: int | None = None) -> list[Located]:
        """The most probable cause first: causes before victims, then those of `first_rank`, then as they came."""
        return sorted(self.counts, key=lambda at: (at.finding.signature.order, at.rank != first_rank))

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


def lines_with_marks(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines that may be of interest, with their numbers. Holds two megabytes at most, whatever the lines' lengths."""
    marks = [mark.encode() for signature in signatures() for mark in signature.marks] + [_ENQUEUED.encode()]
    number, rest = 1, b""
    while block := stream.read(_BLOCK_BYTES):
        data = rest + block
        # A progress bar ends its lines with a carriage return: a failure may stand behind megabytes of those.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _BLOCK_BYTES:
            end = len(data) - _OVERLAP_BYTES
        yield from _marked(data[:end], number, marks)
        number += data.count(b"\n", 0, end)
        rest = data[end:]
    yield from _marked(rest, number, marks)


def _marked(data: bytes, number: int, marks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    present = [mark for mark in marks if mark in data]  # a search in a whole block is many times faster than in lines
    if not present:
        return
    for offset, line in enumerate(data.split(b"\n")):
        for piece in line.split(b"\r"):
            at = min((place for mark in present if (place := piece.find(mark)) >= 0), default=-1)
            if at >= 0:
                start = max(0, at - LONGEST_LINE // 2) if len(piece) > LONGEST_LINE else 0
                text = piece[start : start + LONGEST_LINE].decode("utf-8", errors="replace")
                yield number + offset, _COLOUR.sub("", text).removeprefix(LOG_ONLY)


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
