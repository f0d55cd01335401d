"""`python -m tests.bench links`: 100 MB over a link held to 1 Gbit/s, beside what such a link can carry at the most.

Two hosts as network namespaces, each of which a token bucket holds to the rate as it sends; `collectives` runs there
under real agents. Needs root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.hosts import hosts
from tests.links import goodput, shape

BITS_A_SECOND, SIZE = 1e9, 100_000_000


def measure(folder: Path, seconds: float = 30.0) -> dict[str, Any]:
    """MB a second of bus bandwidth, and of the pair alone, beside the limit."""
    with hosts(2, folder) as lab:
        for host in lab.hosts:
            shape(host, "1gbit", into=False)
        told = folder / "links.json"
        job = lab.launch([
            "collectives", "--operations", "all-reduce,send/recv", "--dtypes", "float32", "--sizes", str(SIZE),
            "--seconds", str(seconds), "--pairs", "hosts", "--pair-size", str(SIZE), "--json", str(told),
        ])  # fmt: skip
        codes = job.codes(240)
        assert codes == [0, 0], job.report()
        found = json.loads(told.read_text())
    limit = goodput(BITS_A_SECOND) / 1e6
    rows: dict[str, Any] = {"limit_mb_s": limit, "rate_mb_s": BITS_A_SECOND / 8e6}
    rows |= {one["operation"]: one["busbw_gb_s"] * 1e3 for one in found["timings"]}
    (_, there), (back, _) = found["links"]["mb_s"]
    return {**rows, "one way": there, "the other way": back}


def main(argv: list[str]) -> dict[str, Any]:
    """Measure and print."""
    print("two hosts, a link of 1 Gbit/s, 100 MB …", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), *map(float, argv[:1]))
    limit = rows["limit_mb_s"]
    print(f"1 Gbit/s is {rows['rate_mb_s']:.1f} MB/s; without headers (1448 bytes of 1514) {limit:.1f} MB/s")
    print(f"{'100 MB':<16}{'MB/s':>8}{'of the limit':>16}")
    for name in ("all-reduce", "send/recv", "one way", "the other way"):
        print(f"{name:<16}{rows[name]:>8.1f}{rows[name] / limit:>16.1%}")
    return rows
