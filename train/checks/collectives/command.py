"""`python -m train collectives`: its options, and the order of things."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.checks.ranked import (
    CheckFailedError,
    Parser,
    at_least,
    refuse_to_go_on_if_stopped,
    refuse_unwritable,
    run_as_rank,
    tell_together,
)
from train.progress import log
from train.seam import Phase

if TYPE_CHECKING:
    from train.checks.collectives.base import Operation, Place
    from train.checks.collectives.correctness import Outcome
    from train.checks.collectives.pairs import Links
    from train.checks.collectives.timing import Timing
    from train.health import Health
    from train.runtime import Runtime

NAMES = ("all-reduce", "reduce", "broadcast", "gather", "scatter", "all-gather", "reduce-scatter", "all-to-all",
         "send/recv", "barrier")  # fmt: skip
TYPES = ("float32", "float64", "bfloat16", "int64")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_EPILOG = """What it does, in this order:
  right?   every operation in every type, with small whole numbers whose sums are exact; the results are compared
           with values worked out by hand, and one wrong number ends it with 5: operation, type, rank, found and must
  fast?    every operation over sizes. algbw is size over time. busbw is what the busiest link has carried, so that it
           compares with the link's data sheet for any number of ranks: algbw × 2(n-1)/n for all-reduce, × (n-1)/n where
           each rank has a part (gather, scatter, all-gather, reduce-scatter, all-to-all), else × 1. Sizes and factors
           are nccl-tests', so the numbers compare with its own; the time is the slowest rank's
  which?   one rank a host sends to every other one by itself; a host all of whose links are slow is named. Ranks of
           one host are measured too, and not judged: they share memory and cores

examples:
  python -m train node --standalone --nproc-per-node 4 -- collectives --seconds 10
  python -m train collectives --operations all-reduce,all-gather --sizes 1M-1G --json all.json --plot all.svg
  python -m train collectives --operations none --pairs hosts --pair-size 64M

Exit codes: 0 all right (slow is a warning) · 2 usage · 5 a wrong result · 6 an operation that never ends."""


def main(argv: Sequence[str]) -> int:
    """Check as one rank; an exit code."""
    parser = Parser(
        "collectives", "Is every collective operation right, how fast, and which host is slow? Each rank runs this.",
        _EPILOG,
    )  # fmt: skip
    what = parser.add_argument_group("what")
    what.add_argument(
        "--operations",
        type=_chosen(NAMES),
        default=list(NAMES),
        metavar="A,B",
        help=f"of {', '.join(NAMES)}; or none (all)",
    )
    what.add_argument(
        "--dtypes",
        type=_chosen(TYPES),
        default=list(TYPES),
        metavar="A,B",
        help=f"to prove right: of {', '.join(TYPES)} (all)",
    )
    what.add_argument(
        "--sizes",
        type=_range,
        default=(2**10, 2**26),
        metavar="A-B",
        help="to measure, as 1K-64M; 0 measures nothing (1K-64M)",
    )
    what.add_argument("--factor", type=at_least(2), default=4, metavar="N", help="from one size to the next (4)")
    what.add_argument("--dtype", choices=TYPES, default="float32", help="to measure with (float32)")
    what.add_argument(
        "--seconds", type=at_least(0, float), default=30.0, metavar="S", help="for all measurements of operations (30)"
    )
    what.add_argument(
        "--pairs",
        choices=("auto", "hosts", "ranks", "none"),
        default="auto",
        help="which pairs to measure; auto: hosts, or the ranks of a single one",
    )
    what.add_argument("--pair-size", type=_size, default=2**22, metavar="B", help="of a message between two (4M)")
    told = parser.add_argument_group("what to write, by rank 0")
    told.add_argument("--json", type=Path, metavar="FILE", help="everything, as JSON")
    told.add_argument("--plot", type=_picture, metavar="FILE", help="bus bandwidth over size, as .svg")
    return run_as_rank(parser, argv, check)


def check(runtime: Runtime, health: Health, options: argparse.Namespace) -> None:
    """All of it, as one rank. Raises CheckFailedError and others."""
    import torch

    from train.checks.collectives import plot, table
    from train.checks.collectives.base import Place
    from train.checks.collectives.correctness import prove_all
    from train.checks.collectives.operations import OPERATIONS

    refuse_unwritable(runtime, options.json, options.plot)
    at = Place(runtime.group(Phase.STEP), runtime.rank, runtime.world_size, runtime.device)
    chosen = [OPERATIONS[name] for name in options.operations]
    health.enter(Phase.FIRST_STEP, 0)
    mine: list[Outcome] = []
    for operation in chosen:
        mine += prove_all([operation], at, options.dtypes)
        _get_on(runtime, health)
    outcomes = runtime.gather(mine)
    hosts = runtime.gather(runtime.host)
    facts = {"torch": torch.__version__, "backend": runtime.backend, "device": str(runtime.device.type),
             "ranks": runtime.world_size, "hosts": hosts, "dtype": options.dtype}  # fmt: skip
    _say(f"{runtime.world_size} ranks on {len(set(hosts))} hosts · {runtime.backend} on {runtime.device.type} · "
         f"torch {torch.__version__}")  # fmt: skip
    _say(*(table.of_outcomes(outcomes) if mine else ()))
    wrong = [one.problem for one in mine if one.problem]
    timings: list[Timing] = []
    links: Links | None = None
    if not any(one.problem for theirs in outcomes for one in theirs):
        tried = {one.operation for one in mine if not one.lacking}
        timings = _measure(runtime, health, options, at, [one for one in chosen if one.name in tried])
        wrong += [one.problem for one in timings if one.problem]
        links = _pairs(runtime, health, options, at, hosts)
    if runtime.rank == 0:
        _write(options.json, lambda: json.dumps(table.as_json(facts, outcomes, timings, links), indent=1) + "\n")
        title = f"{runtime.world_size} ranks on {len(set(hosts))} hosts, {runtime.backend}, {options.dtype}"
        _write(options.plot, lambda: plot.svg(timings, title))
    tell_together(runtime, [f"{problem} ({runtime.host})" for problem in wrong])


def _measure(
    runtime: Runtime, health: Health, options: argparse.Namespace, at: Place, operations: Sequence[Operation]
) -> list[Timing]:
    from train.checks.collectives import table
    from train.checks.collectives.timing import agree_on_most, measure_all, sizes_between

    low, high = options.sizes
    sizes = sizes_between(low, high, int(options.factor)) if high else []
    if not operations or not sizes:
        return []
    _say("", table.heading())
    timings: list[Timing] = []
    most = agree_on_most(runtime.group(Phase.SAVING))
    for timing in measure_all(operations, at, options.dtype, sizes, options.seconds, most):
        timings.append(timing)
        _say(table.of_timing(timing))
        _get_on(runtime, health)
    return timings


def _pairs(
    runtime: Runtime, health: Health, options: argparse.Namespace, at: Place, hosts: Sequence[str]
) -> Links | None:
    """Each pair of hosts, or of ranks; None where there are not two."""
    from train.checks.collectives import table
    from train.checks.collectives.pairs import links_of, measure_pairs

    several = len(set(hosts)) > 1
    by_host = options.pairs == "hosts" or (options.pairs == "auto" and several)
    members = [hosts.index(host) for host in dict.fromkeys(hosts)] if by_host else list(range(len(hosts)))
    if options.pairs == "none" or len(members) < 2:
        return None
    names = [hosts[rank] if by_host else f"rank {rank}" for rank in members]
    told = []
    for got in measure_pairs(members, at, options.pair_size):
        told.append(got)
        _get_on(runtime, health)
    mine = {pair: found for got in told for pair, found in got.items()}
    links = links_of(names, runtime.gather(mine), judged=several)
    _say("", *table.of_links(links))
    for finding in links.findings if runtime.rank == 0 else ():
        log.warning(finding)
    if by_host and len(members) == 2:
        _say("two hosts have one link: nobody can say which end of it is slow")
    elif several and not links.findings:
        _say("no host and no link is slower than half of what is usual")
    return links


def _get_on(runtime: Runtime, health: Health) -> None:
    refuse_to_go_on_if_stopped(runtime, health)
    health.enter(Phase.STEP, health.step + 1)


def _say(*lines: str) -> None:
    for line in lines:
        log.info(line)


def _write(path: Path | None, text: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise CheckFailedError(f"cannot write {path}: {error.strerror}") from None


def _chosen(known: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        given = [] if text == "none" else text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return given

    return names


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64K, 4M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    found = _size(low), _size(high if dash else low)
    if found[1] and not 0 < found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must rise, as 1K-64M does")
    return found


def _picture(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg: other pictures would need matplotlib")
    return Path(text)
