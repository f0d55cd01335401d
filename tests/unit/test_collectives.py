"""What `collectives` expects, computes and concludes, without ranks: values by hand, rounds, slow hosts, tables."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
import torch

from tests.unit.test_cli import said
from train.checks.collectives import plot, table
from train.checks.collectives.correctness import Outcome
from train.checks.collectives.operations import OPERATIONS
from train.checks.collectives.pairs import Links, links_of, rounds, slow
from train.checks.collectives.timing import Timing, sizes_between
from train.checks.collectives.values import DTYPES, moved, summand, total

CPU = torch.device("cpu")
BY_HAND = {  # ranks give 1 + (rank + i) mod 7: these are the sums for i = 0 to 7, added up on paper
    1: [1, 2, 3, 4, 5, 6, 7, 1],
    2: [3, 5, 7, 9, 11, 13, 8, 3],
    3: [6, 9, 12, 15, 18, 14, 10, 6],
    4: [10, 14, 18, 22, 19, 16, 13, 10],
    5: [15, 20, 25, 23, 21, 19, 17, 15],
}


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("ranks", BY_HAND)
def test_the_total_is_the_one_added_up_on_paper(ranks: int, dtype: torch.dtype) -> None:
    found = total(ranks, 0, 8, dtype, CPU)
    assert found.dtype == dtype
    assert found.tolist() == BY_HAND[ranks]


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("ranks", [1, 6, 7, 8, 36, 37, 100, 255, 256, 257, 300, 1000])
def test_totals_of_many_ranks_are_exact_in_any_order(ranks: int, dtype: torch.dtype) -> None:
    theirs = [summand(rank, ranks, 20, dtype, CPU) for rank in range(ranks)]
    by_python = [sum(int(one[i]) for one in theirs) for i in range(20)]
    assert total(ranks, 0, 20, dtype, CPU).tolist() == by_python
    assert total(ranks, 7, 5, dtype, CPU).tolist() == by_python[7:12]
    assert all(int(one.min()) >= 0 for one in theirs)
    assert dtype != torch.bfloat16 or max(by_python) <= 256  # so no partial sum is rounded either
    if dtype == torch.bfloat16:
        in_order = sum(theirs[1:], theirs[0])
        backwards = sum(theirs[-2::-1], theirs[-1])
        assert in_order.tolist() == backwards.tolist() == by_python


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_is_moved_is_exact_and_tells_ranks_apart(dtype: torch.dtype) -> None:
    theirs = [moved(rank, 0, 300, dtype, CPU) for rank in range(251)]
    assert len({int(one[0]) for one in theirs}) == 251
    assert [int(value) for value in theirs[2][:3]] == [35, 36, 37]
    assert torch.equal(theirs[4][10:20], moved(4, 10, 10, dtype, CPU))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 16])
def test_rounds_hold_every_pair_once_and_nobody_twice(count: int) -> None:
    found = rounds(count)
    assert len(found) == (count - 1 if count % 2 == 0 else count)
    for pairs in found:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
    pairs = sorted((min(pair), max(pair)) for pairs in found for pair in pairs)
    assert pairs == list(itertools.combinations(range(count), 2))


def matrix(count: int, speeds: dict[tuple[int, int], float], usual: float = 100.0) -> list[list[float]]:
    return [[math.nan if i == j else speeds.get((i, j), usual) for j in range(count)] for i in range(count)]


def names(count: int) -> list[str]:
    return [f"node{i}" for i in range(count)]


@pytest.mark.parametrize("count", [3, 4, 8, 20])
@pytest.mark.parametrize("who", [0, 1, -1])
def test_the_one_slow_host_is_named_and_nobody_else(count: int, who: int) -> None:
    who %= count
    out = {(who, j): 10.0 for j in range(count)}
    into = {(j, who): 10.0 for j in range(count)}
    (both,) = slow(names(count), matrix(count, out | into))
    assert both.startswith(f"node{who} is slow: at best 10 MB/s out and 10 MB/s in, where 100 MB/s is usual")
    (sends,) = slow(names(count), matrix(count, out))
    assert sends.startswith(f"node{who} sends slowly: at best 10 MB/s out and 100 MB/s in")
    (receives,) = slow(names(count), matrix(count, into))
    assert receives.startswith(f"node{who} receives slowly: at best 100 MB/s out and 10 MB/s in")


def test_one_slow_link_is_not_blamed_on_a_host() -> None:
    found = slow(names(4), matrix(4, {(1, 3): 20.0}))
    assert found == ["the link node1 → node3 alone is slow: 20 MB/s where 100 MB/s is usual here"]


def test_links_that_differ_a_little_or_two_hosts_alone_accuse_nobody() -> None:
    assert slow(names(5), matrix(5, {(0, j): 60.0 for j in range(5)})) == []
    assert slow(names(2), matrix(2, {(0, 1): 1.0})) == []


def test_ranks_of_one_host_are_measured_and_not_judged() -> None:
    told = [{(i, j): (1.0 if i == 0 else 100.0, 50.0) for j in range(3) if j != i} for i in range(3)]
    assert len(links_of(names(3), told, judged=True).findings) == 1
    links = links_of(names(3), told, judged=False)
    assert (links.findings, links.mb_s[0][1], links.mb_s[1][0], links.round_trip_us[2][1]) == ([], 1.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all-reduce", 1.5), ("reduce", 1.0), ("broadcast", 1.0), ("gather", 0.75), ("scatter", 0.75),
     ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("send/recv", 1.0)],
)  # fmt: skip
def test_bandwidths_of_four_ranks_by_the_definitions_of_nccl_tests(operation: str, factor: float) -> None:
    timing = Timing(operation, 10**9, 3, 0.5, 4, OPERATIONS[operation].bus_factor(4))
    assert timing.algorithm_gb_s == pytest.approx(2.0)  # 1 GB in half a second
    assert timing.bus_gb_s == pytest.approx(2.0 * factor)


def test_sizes_rise_by_the_factor() -> None:
    assert sizes_between(1024, 2**16, 4) == [1024, 4096, 16384, 65536]
    assert sizes_between(100, 99, 2) == []


def test_tables_fit_a_hundred_columns_and_wrong_stands_out() -> None:
    outcomes = [[Outcome(name, dtype, "bad" if rank == 1 and name == "reduce" else "") for name in OPERATIONS
                 for dtype in DTYPES] for rank in range(3)]  # fmt: skip
    lines = [*table.of_outcomes(outcomes), table.heading()]
    assert "1 WRONG" in next(line for line in lines if line.startswith("reduce "))
    lines += [table.of_timing(Timing("reduce-scatter", 2**size, 1000, 2.0**size / 1e9, 8, 1)) for size in range(40)]
    lines.append(table.of_timing(Timing("all-reduce", 2**30, 0, 0.0, 8, 1)))
    for count in (2, 10, 11, 200):
        wide = [f"host-with-a-long-name-{i}" for i in range(count)]
        lines += table.of_links(Links(wide, matrix(count, {}, 123456.0), matrix(count, {})))
    assert max(map(len, lines)) <= 100
    assert "not measured" in next(line for line in lines if line.startswith("all-reduce  ") and "1 GiB" in line)


@pytest.mark.parametrize("names", [["all-reduce"], list(OPERATIONS)[:9], []])
def test_the_plot_is_well_formed_and_names_every_line_once(names: list[str]) -> None:
    timings = [
        Timing(name, 4**k, 5, 4.0**k / 1e9 + 1e-5 * n, 4, 1.0) for n, name in enumerate(names) for k in range(5, 12)
    ]
    root = ElementTree.fromstring(plot.svg([*timings, Timing("barrier", 0, 5, 1e-3, 4, 1.0)], "a < b & c"))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a < b & c"
    assert [text for text in texts if text in OPERATIONS] == names
    heights = sorted(
        float(t.get("y", "0")) for t in root.iter("{http://www.w3.org/2000/svg}text") if t.text in OPERATIONS
    )
    assert all(below - above > 14 for above, below in itertools.pairwise(heights))  # no name lies on another


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--plot", "a.png"], "must end in .svg"),
        (["--sizes", "64M-1K"], "must rise"),
        (["--sizes", "many"], "no size such as 64K"),
        (["--operations", "all-reduse"], "'all-reduse' is none of all-reduce"),
        (["--seconds", "nan"], "must be at least 0"),
        (["--factor", "1"], "must be at least 2"),
    ],
)
def test_bad_options_are_refused_with_words(argv: list[str], words: str) -> None:
    code, out, err = said("collectives", *argv)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize("command", ["collectives", "verify"])
def test_help_teaches_and_fits(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = said(command, "--help")
    assert code == 0
    assert f"-- {command}" in out
    assert "Exit codes: 0" in out
    assert max(map(len, out.splitlines())) <= 120
    for option in re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE):
        assert option in out
