"""Names that nobody reads, each with the nearest one that somebody does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

SHORT = ("slots", "address")
OPTIONAL = (*SHORT, "muster_cluster_network")
"""Variables of hosts that have no default."""


def misspelt(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Variables that nobody reads, each with the nearest one that somebody does."""
    return [
        f"{name}: no such variable{nearest(name, known)}"
        for name in given
        if name not in known and not name.startswith("ansible_")
    ]


def misspelt_by_hosts(given: Mapping[str, Sequence[str]], known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Variables of an inventory that nobody reads: those that can only be ours, and those that look like ours.

    Args:
        given: names of each host's variables, of whatever origin.
        known: those of roles and playbooks.
    """
    ours = {*known, *OPTIONAL}
    hosts: dict[str, list[str]] = {}
    for host, names in given.items():
        for name in {*names} - ours:
            hosts.setdefault(name, []).append(host)
    certain, likely = [], []
    for name in sorted(hosts):
        where = f"{name}: no such variable (inventory, {', '.join(hosts[name])})"
        if name.startswith("muster_"):
            certain.append(where + nearest(name, sorted(ours)))
            continue
        match = difflib.get_close_matches(name, sorted(ours), n=1, cutoff=0.88)
        if match and (match[0] in SHORT or name.split("_")[0] == match[0].split("_")[0]):
            likely.append(f"{where}; did you mean {match[0]}?")
    return certain, likely


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean …?` with the known word most like this one, or nothing."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""
