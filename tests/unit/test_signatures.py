"""Known failures: each is found by a line that was really printed, and not by one that only looks like it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import ROOT, clean_environment
from tests.unit.signature_samples import SAMPLES
from train.launch.signature_table import TABLE
from train.launch.signatures import diagnose, find

QUICK = settings(max_examples=100, deadline=None, database=None)


@pytest.mark.parametrize(("name", "line", "_near"), SAMPLES, ids=[f"{i}-{s[0]}" for i, s in enumerate(SAMPLES)])
def test_a_real_line_is_found_by_its_own_signature_first(name: str, line: str, _near: str) -> None:
    found = find(line)
    assert found is not None
    assert found.signature.name == name


@pytest.mark.parametrize(("name", "_line", "near"), SAMPLES, ids=[f"{i}-{s[0]}" for i, s in enumerate(SAMPLES)])
def test_a_line_that_only_looks_like_it_is_not(name: str, _line: str, near: str) -> None:
    found = find(near)
    assert found is None or found.signature.name != name


def test_every_signature_has_a_sample_and_a_name_of_its_own() -> None:
    names = [signature.name for signature in TABLE]
    assert len(set(names)) == len(names)
    assert {name for name, _, _ in SAMPLES} == set(names)


@pytest.mark.parametrize("name", [signature.name for signature in TABLE if signature.pattern is not None])
def test_a_pattern_refuses_a_line_that_its_marks_let_pass(name: str) -> None:
    (signature,) = (signature for signature in TABLE if signature.name == name)
    near = [near for sample, _, near in SAMPLES if sample == name]
    assert any(mark in line for mark in signature.marks for line in near)


@pytest.mark.parametrize("signature", TABLE, ids=lambda signature: signature.name)
def test_words_read_well_in_a_verdict(signature: object) -> None:
    """`rank 3 failed: CAUSE: ADVICE`: no capitals, no full stops, and nothing left to be filled in."""
    name = signature.name  # type: ignore[attr-defined]
    for _, line, _ in (sample for sample in SAMPLES if sample[0] == name):
        found = find(line)
        assert found is not None
        for words in (found.cause, found.advice):
            assert not words.endswith((".", " "))
            assert "{" not in words and "?" not in words.split("; does")[0]
            assert "  " not in words
        first = found.cause.split()[0]
        assert first.islower() or first in {
            "Gloo",
            "NCCL",
            "SSH",
            "GPU",
            "Docker",
            "Slurm",
            "Slurm's",
            "InfiniBand",
            "Python",
        }
        assert found.kind in ("exception", "environment", "collective")


@pytest.mark.parametrize("signature", TABLE, ids=lambda signature: signature.name)
def test_marks_are_what_the_pattern_needs(signature: object) -> None:
    """A mark that no sample has is a signature that is never looked at."""
    name, marks = signature.name, signature.marks  # type: ignore[attr-defined]
    lines = " ".join(line for sample, line, _ in SAMPLES if sample == name)
    assert any(mark in lines for mark in marks)


def test_sizes_and_names_are_taken_from_the_line() -> None:
    words = {name: found.cause for name, line, _ in reversed(SAMPLES) if (found := find(line))}
    assert words["cuda-oom"] == "GPU 3 was full: 20.00 MiB wanted, 17.75 MiB of 79.15 GiB free"
    assert words["cuda-oom-old"] == "GPU 0 was full: 2.00 GiB wanted, 1.21 GiB of 23.69 GiB free"
    assert words["port-in-use"] == "port 26100 was already in use"
    assert words["nccl-timeout"] == "rank 0 waited 600060 ms in vain for the others in ALLREDUCE #1580"
    assert words["mismatch"] == "ranks 0 and 1 called different collectives, or with different shapes"
    assert words["barrier"] == "rank 1, 3 did not come to a barrier"
    assert words["munge"] == "Slurm's hosts do not trust each other's messages: Invalid credential"
    assert words["library"] == "the library libcudart.so.12 is missing"
    assert words["glibc"] == "libc of that host is too old: GLIBC_2.34 is missing"
    assert words["nvidia-cli"].endswith("initialization error: WSL environment detected but no adapters were found")


# Which of several


def sample(name: str) -> str:
    return next(line for kind, line, _ in SAMPLES if kind == name)


def cause_of(*names: str) -> str | None:
    found = diagnose(["nothing", *map(sample, names), "nothing more"])
    return found and found.signature.name


def test_a_cause_goes_before_its_victims_whichever_came_first() -> None:
    assert cause_of("peer-gone", "cuda-oom") == "cuda-oom"
    assert cause_of("nccl-timeout", "refused", "no-module") == "no-module"


def test_what_may_be_harmless_goes_after_what_is_not() -> None:
    assert cause_of("no-module", "c10d-name", "disk-full") == "disk-full"
    assert cause_of("c10d-name", "connect-timeout") == "c10d-name"


def test_of_equals_the_first_is_the_cause() -> None:
    assert cause_of("disk-full", "host-memory") == "disk-full"
    assert cause_of("host-memory", "disk-full") == "host-memory"
    assert cause_of("gloo-timeout", "peer-gone") == "gloo-timeout"


def test_nothing_known_is_nothing() -> None:
    assert diagnose([]) is None
    assert diagnose(["step 12 loss 3.1", "Traceback (most recent call last):", "ValueError: expected 3"]) is None


@QUICK
@given(st.text(max_size=300))
def test_no_line_breaks_it(line: str) -> None:
    find(line)


@QUICK
@given(st.sampled_from(SAMPLES), st.text(alphabet="[]{}%$\\ \t\0é", max_size=20))
def test_braces_in_a_log_are_no_templates(case: tuple[str, str, str], noise: str) -> None:
    find(f"{noise}{case[1]}{noise}")


def test_a_line_of_megabytes_costs_no_time() -> None:
    began = time.perf_counter()
    assert find("FileNotFoundError: " + "x" * 5_000_000) is None
    assert find("CUDA out of memory. " + "Tried to allocate 1 " * 250_000) is not None
    assert (
        find("No such file or directory " + "FileNotFoundError: " * 20_000) is None
    )  # minutes, were it looked at whole
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("signature", TABLE, ids=lambda signature: signature.name)
def test_no_pattern_takes_long_over_a_hostile_line(signature: object) -> None:
    marks = signature.marks  # type: ignore[attr-defined]
    lines = [mark * (4000 // len(mark)) for mark in marks] + [(mark + " 1, 2.3 MiB:" * 20) * 10 for mark in marks]
    began = time.perf_counter()
    for line in lines:
        signature.match(line)  # type: ignore[attr-defined]
    assert time.perf_counter() - began < 0.5


def test_importing_them_costs_next_to_nothing() -> None:
    """The table and its patterns are made when the first line is looked at."""
    script = "import sys, train.launch.signatures; print('train.launch.signature_table' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
