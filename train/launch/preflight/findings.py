"""What a preflight has found: a level, what was seen, and what mends it; as a table and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from train.seam import Exit

OK, UNKNOWN, WARNING, ERROR = "ok", "could not tell", "warning", "error"
_ORDER = (OK, UNKNOWN, WARNING, ERROR)
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """Of one check, about hosts that have it in common."""

    check: str
    level: str
    hosts: tuple[str, ...]
    """Whom it is about; nobody in particular: none."""
    seen: str
    fix: str = ""
    """A command, or what to do."""


def worst(findings: Sequence[Finding]) -> str:
    """The worst level among them."""
    return max((finding.level for finding in findings), key=_ORDER.index, default=OK)


def exit_code(findings: Sequence[Finding]) -> Exit:
    """3 where a host is not fit."""
    return Exit.PREFLIGHT if worst(findings) == ERROR else Exit.FINISHED


def bad_hosts(findings: Sequence[Finding]) -> dict[str, str]:
    """Hosts with an error of their own, and the first one."""
    bad: dict[str, str] = {}
    for finding in findings:
        if finding.level == ERROR:
            for host in finding.hosts:
                bad.setdefault(host, f"{finding.check}: {finding.seen}")
    return bad


def table(findings: Sequence[Finding], hosts: int, took_s: float) -> str:
    """For people: a row for each check that is well, and a paragraph for each that is not; worst last."""
    width = max((len(finding.check) for finding in findings), default=0)
    rows = []
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        names = f"{_few(finding.hosts)}: " if finding.hosts else ""
        head = f"  {finding.level:<{len(UNKNOWN)}}  {finding.check:<{width}}  "
        rows += textwrap.wrap(f"{names}{finding.seen}", _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if finding.fix:
            lead = " " * len(head)
            rows += [f"{lead}→ {line}" if not i else f"{lead}  {line}" for i, line in enumerate(_wrapped(finding.fix))]
    return "\n".join([*rows, words(findings, hosts, took_s)])


def _wrapped(fix: str) -> list[str]:
    """Commands are not broken: they are to be copied."""
    return fix.splitlines()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def words(findings: Sequence[Finding], hosts: int, took_s: float) -> str:
    """The last line."""
    of = "1 host" if hosts == 1 else f"{hosts} hosts"
    bad = bad_hosts(findings)
    if exit_code(findings) == Exit.FINISHED:
        count = sum(finding.level == WARNING for finding in findings)
        but = f", with {count} warning{'s' * (count > 1)}" if count else ""
        fit = "is fit" if hosts == 1 else "are fit, each and together"
        return f"muster: {of} {fit}{but} ({took_s:.1f} s; exit code 0: finished)"
    who = f"not fit: {_few([*bad])}" if bad else "not fit"
    return f"muster: of {of} {who} ({took_s:.1f} s; exit code 3: a host is not fit for the job)"


def as_dict(findings: Sequence[Finding], hosts: Sequence[str], took_s: float) -> dict[str, Any]:
    """For JSON."""
    return {
        "fit": exit_code(findings) == Exit.FINISHED, "hosts": [*hosts], "bad_hosts": bad_hosts(findings),
        "findings": [asdict(finding) for finding in findings], "took_s": round(took_s, 2),
    }  # fmt: skip
