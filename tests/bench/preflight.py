"""`make bench-preflight`: how long it takes, how it grows with hosts, and whether hosts that are well are found well.

python -m tests.bench.preflight [REPETITIONS]    needs root. Hosts are network namespaces of this machine: with many
of them its cores are what is measured, not the network's.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts import hosts, why_not
from tests.preflights import looked_at

REPETITIONS = 20
ALARM_ON = 4
GROWTH = (2, 4, 16, 50, 100)


def main() -> int:
    """Measure, print; 1 where there was a false alarm."""
    reason = why_not()
    if reason is not None:
        print(f"no bench: {reason}", file=sys.stderr)
        return 1
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    alarms = repeat(count)
    for size in GROWTH:
        grow(size)
    return int(alarms > 0)


def repeat(count: int) -> int:
    """The whole of it on hosts that are well, again and again; how often something was wrong."""
    alarms, took_s = 0, []
    with hosts(ALARM_ON) as lab, tempfile.TemporaryDirectory() as folder:
        runs = [f"{folder}/{host.name}" for host in lab.hosts]
        for number in range(count):
            began_s = time.monotonic()
            verdict = looked_at(lab, runs)
            took_s.append(time.monotonic() - began_s)
            bad = [finding for finding in verdict["findings"] if finding["level"] != "ok"]
            alarms += bool(bad)
            print(f"{number + 1:4}: {took_s[-1]:5.1f} s {bad or ''}", file=sys.stderr)
    print(
        f"preflight of {ALARM_ON} hosts with all-reduce: {statistics.median(took_s):.1f} s (median of {count}), "
        f"{max(took_s):.1f} s at most; false alarms: {alarms}"
    )
    return alarms


def grow(size: int) -> None:
    """Once on so many hosts, all pairs called; without the all-reduce: torch would be loaded so many times."""
    with hosts(size) as lab, tempfile.TemporaryDirectory() as folder:
        runs = [str(Path(folder) / host.name) for host in lab.hosts]
        began_s = time.monotonic()
        verdict = looked_at(lab, runs, "--no-all-reduce", "--patience-s", "60")
        took_s = time.monotonic() - began_s
    bad = [finding["seen"] for finding in verdict["findings"] if finding["level"] != "ok"]
    print(f"preflight of {size:3} hosts, {size * (size - 1):5} pairs, without all-reduce: {took_s:5.1f} s {bad or ''}")


if __name__ == "__main__":
    sys.exit(main())
