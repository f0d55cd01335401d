"""TUTORIAL.md is true: its commands run, its links and functions are there, and what it calls wrong goes wrong."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.jobs import joined
from tests.ranks import ROOT, clean_environment, free_port, rank_environment, run_ranks, run_together
from train import cli
from train.checks.pitfalls.promises import LESSONS

PAGE = ROOT / "train" / "TUTORIAL.md"
TEXT = PAGE.read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
OF_PITFALLS = [command for command in COMMANDS if command.startswith("python -m train pitfalls")]
"""Run by tests/distributed/test_pitfalls.py, every lesson that there is."""
ELSEWHERE = {"python -m train explain my-run": "tests/distributed/test_node.py"}
TO_COME = {
    "python -m train node --standalone --nproc-per-node 2 -- collectives": "collectives",
    "python -m train node --standalone --nproc-per-node 2 -- verify": "verify",
}
"""Commands that are tested here as soon as there are any of that name."""

# The page.


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in [*OF_PITFALLS, *ELSEWHERE]])
def test_a_command_of_the_tutorial_runs(command: str, tmp_path: Path) -> None:
    if TO_COME.get(command, "run") not in [*cli._TOOLS, "run"]:
        pytest.skip(f"there is no command {TO_COME[command]!r} yet")
    words = [sys.executable, *shlex.split(command)[1:]]
    if "node" in words:
        words[4:4] = ["--runs-dir", str(tmp_path), "--run-id", "tutorial"]
    elif "run" in words:
        words += ["--runs-dir", str(tmp_path), "--run-id", "tutorial"]
    if "run" in words:
        words += ["--train.steps", "3", "--train.sample_tokens", "8"]
        words += [] if "--data.name" in words else ["--data.paths", "train/*.py"]  # a small text: quick to evaluate
    (done,) = run_together([words], [clean_environment()])
    assert done.returncode == 0, done.stdout
    if "run" in words:
        assert (tmp_path / "tutorial" / "checkpoints" / "latest").read_text().strip() == "step-00000003"


def test_there_are_commands_and_those_tested_elsewhere_are_among_them() -> None:
    assert len(COMMANDS) > 25
    assert all(command.startswith("python -m train ") for command in COMMANDS)
    assert set(ELSEWHERE) | set(TO_COME) <= set(COMMANDS)
    assert {shlex.split(command)[4] for command in OF_PITFALLS} == set(LESSONS)
    assert all(len(shlex.split(command)) == 5 for command in OF_PITFALLS)


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 40
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_every_function_that_is_named_is_in_the_file_that_is_named() -> None:
    named = re.findall(r"\[`([^`:]+):([^`]+)`\]\(([^)]+)\)", TEXT)
    assert len(named) > 40
    for shown, function, link in named:
        assert shown == link
        node: Any = ast.parse((PAGE.parent / link).read_text())
        for part in function.split("."):
            found = [inner for inner in node.body if getattr(inner, "name", None) == part]
            assert found, f"{shown} has no {function}"
            node = found[0]


def test_the_sections_are_the_tutorials_in_its_order() -> None:
    sections = [re.sub(r"[`?]", "", line.lstrip("# ")) for line in TEXT.splitlines() if line.startswith("#")]
    order = [
        *("Single-GPU", "DataParallel", "Scatter", "limits", "setup", "spawn", "DistributedSampler", "Gradient synch"),
        *("How DDP", "By hand", "Communication", "accumulation", "mixed precision", "Multi-node", "complete example"),
        *("Synchronization", "Rank 0", "Deadlocks", "Debugging", "process group", "Hangs", "gradients agree"),
        *("Summary", "wrong"),
    ]
    assert [part for title, part in zip(sections[1:], order, strict=True) if part not in title] == []


def test_what_is_called_wrong_is_seen_in_a_lesson_or_in_a_test() -> None:
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", TEXT.partition("## What the tutorial has wrong")[2], re.MULTILINE)[2:]
    assert len(rows) == 15
    for seen in rows:
        name = seen.strip("`")
        assert name in LESSONS or callable(globals().get(name)) or name == "read in its text", name


# What the tutorial has wrong.


def test_the_sampler_knows_no_world_size() -> None:
    with pytest.raises(TypeError, match="world_size"):
        DistributedSampler(range(4), rank=0, world_size=2)  # type: ignore[call-arg, arg-type]


def test_the_old_autocast_takes_no_device_type() -> None:
    with warnings.catch_warnings(), pytest.raises(TypeError, match="device_type"):
        warnings.simplefilter("ignore")  # it is deprecated as well
        torch.cuda.amp.autocast(device_type="cuda")  # type: ignore[call-arg]
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")


def test_a_loader_cannot_be_made_before_the_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="process group"):
        DistributedSampler(range(4), num_replicas=dist.get_world_size(), rank=0)  # type: ignore[arg-type]


def _ids(rank: int, epoch: int, length: int = 8, *, drop_last: bool = False) -> list[int]:
    sampler: DistributedSampler[int] = DistributedSampler(range(length), 2, rank, drop_last=drop_last)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def test_set_epoch_is_about_epochs_and_not_about_ranks() -> None:
    assert _ids(0, 0) != _ids(0, 1)
    for epoch in (0, 1):
        assert sorted(_ids(0, epoch) + _ids(1, epoch)) == list(range(8))
    mixed = sorted(_ids(0, 0) + _ids(1, 1))  # each rank an epoch, and so an order, of its own
    assert mixed != list(range(8))


def test_drop_last_of_a_sampler_is_not_that_of_a_loader() -> None:
    mine = _ids(0, 0, 9, drop_last=True)
    assert len(mine) == len(_ids(1, 0, 9, drop_last=True)) == 4  # of nine samples, eight
    assert [len(batch) for batch in DataLoader(range(9), batch_size=3, sampler=mine)] == [3, 1]  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_without_a_seed_draw_different_data() -> None:
    draw = "import torch; print(torch.randn(3).tolist())"
    drawn = [
        subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert drawn[0] != drawn[1]


def test_to_moves_a_module_and_makes_no_replica() -> None:
    module = torch.nn.Linear(1, 1)
    assert module.to("meta") is module
    assert module.weight.is_meta  # gone from where it was


def _scatter_with_lists_everywhere() -> str:
    runtime = joined()
    group = dist.new_group()  # what goes wrong in it must not be in the way of others
    mine, parts = torch.zeros(1), [torch.ones(1), torch.ones(1)]
    if runtime.rank == 0:
        dist.scatter(mine, scatter_list=parts, src=0, group=group)
        return "sent"
    try:
        dist.scatter(mine, scatter_list=parts, src=0, group=group)
    except ValueError as error:
        dist.scatter(mine, src=0, group=group)  # or rank 0 would wait for ever
        return f"{error}; then {mine.item():g}"
    return "received"


def test_a_scatter_list_is_the_sources_alone() -> None:
    sent, refused = run_ranks(2, _scatter_with_lists_everywhere)
    assert sent == "sent"
    assert "NOT be specified on non-source ranks" in refused
    assert refused.endswith("then 1")


_JOIN = """
import torch.distributed as dist
from datetime import timedelta
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
except dist.DistError as error:
    print("nobody:", error)
"""


@pytest.mark.slow
def test_two_processes_are_no_world_of_eight() -> None:
    port = free_port()
    environments = [clean_environment(**rank_environment(rank, 8, port)) for rank in (0, 4)]
    done = run_together([[sys.executable, "-c", _JOIN]] * 2, environments, timeout_s=60)
    assert all("nobody:" in process.stdout for process in done), [process.stdout for process in done]
