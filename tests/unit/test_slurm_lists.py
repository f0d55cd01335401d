"""Slurm's lists of hosts and counts, as its own tools read them (F12, F13)."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.errors import UsageError
from train.identity import first_host
from train.slurm_lists import expand_counts, expand_hosts

QUICK = settings(max_examples=60, deadline=None, database=None)


@pytest.fixture(autouse=True)
def _no_slurm_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),
        ("rack[1-2]node[1-4]", [f"rack{r}node{n}" for r in (1, 2) for n in (1, 2, 3, 4)]),
        ("n[1,3-5,08]", ["n1", "n3", "n4", "n5", "n08"]),
        ("alpha,beta", ["alpha", "beta"]),
        ("beta,alpha", ["beta", "alpha"]),
        ("n[009-011]", ["n009", "n010", "n011"]),
        ("gpu-[3-4].cluster,login", ["gpu-3.cluster", "gpu-4.cluster", "login"]),
        ("solo", ["solo"]),
    ],
)
def test_hosts_come_in_the_order_given(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1", "n[]", "n]1[", ","])
def test_a_list_of_hosts_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"host list .* cannot be read"):
        expand_hosts(text)


def test_slurms_own_tool_is_asked_first_but_never_for_nothing(tmp_path: Path) -> None:
    """`scontrol show hostnames` without a list expands the job's own."""
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$3" = "n[7-8]" ] || [ -z "$3" ] || exit 1\necho from-slurm\necho second\n')
    tool.chmod(0o755)
    assert expand_hosts("n[7-8]") == ["from-slurm", "second"]
    assert expand_hosts("n[1-2]") == ["n1", "n2"]  # it refuses: the library then
    with pytest.raises(UsageError):
        expand_hosts("")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,3(x2),2", [1, 3, 3, 2]), ("16(x1)", [16]), ("2(x2), 1", [2, 2, 1])],
)
def test_counts_are_unfolded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "two", "2,,1", "2(3)", "-1", "1.5", "2(x)"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"counts .* cannot be read"):
        expand_counts(text)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=8))
def test_counts_of_any_layout(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


# Their first host, rank 0's


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One bracket as Slurm writes it, and its numbers."""
    parts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width, low, more = draw(st.integers(1, 3)), draw(st.integers(0, 99)), draw(st.integers(0, 3))
        numbers += [str(n).zfill(width) for n in range(low, low + more + 1)]
        parts.append(str(low).zfill(width) + (f"-{str(low + more).zfill(width)}" if more else ""))
    return f"[{','.join(parts)}]", numbers


@QUICK
@given(
    st.lists(st.tuples(st.from_regex(r"[a-z]{1,4}-?", fullmatch=True), _ranges()), min_size=1, max_size=2), st.data()
)
def test_the_first_host_of_any_list(pieces: list[tuple[str, tuple[str, list[str]]]], data: st.DataObject) -> None:
    written = "".join(name + bracket for name, (bracket, _) in pieces)
    expanded = ["".join(p) for p in product(*[[n + d for d in digits] for n, (_, digits) in pieces])]
    tail = data.draw(st.sampled_from(["", ",zz", ",zz[1-2]"]))
    assert first_host(written + tail) == expanded[0]


@pytest.mark.parametrize("hosts", ["n[1", "n[]", "n]1[", ""])
def test_a_host_list_that_cannot_be_read_is_refused(hosts: str) -> None:
    with pytest.raises(UsageError, match="cannot be read; give --rank"):
        first_host(hosts)


def test_slurms_own_expansion_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[7-8]" ] || exit 1\necho from-slurm\necho second\n')
    tool.chmod(0o755)
    assert first_host("n[7-8]") == "from-slurm"
    assert first_host("n[1-2]") == "n1"  # it refuses: the library then
    monkeypatch.setenv("PATH", os.devnull)
    assert first_host("n[7-8]") == "n7"
