"""Each pitfall's wrong half fails as promised, its right half passes: figures against values worked out another way."""

from __future__ import annotations

import ast
import dataclasses
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import joined
from tests.ranks import ROOT, run_ranks, train
from train.checks import pitfalls
from train.checks.pitfalls import trial
from train.checks.pitfalls.promises import LESSONS, Lesson, is_as_promised
from train.checks.pitfalls.team import Team
from train.checks.pitfalls.trial import Result, try_out
from train.eager import keep_compiler_out

FOLDER = ROOT / "train" / "checks" / "pitfalls"
HANGING = [name for name, lesson in LESSONS.items() if lesson.hangs]
MEASURED = [name for name, lesson in LESSONS.items() if not lesson.hangs]
HALVES = [f"{name}:{which}" for name in LESSONS for which in ("wrong", "right") if which == "right" or name in MEASURED]


def _run_halves(halves: list[str]) -> dict[str, tuple[float, list[str]]]:
    keep_compiler_out()
    runtime = joined()  # the process group that tests of other files use too
    seen = {}
    for half in halves:
        name, _, which = half.partition(":")
        team = Team(runtime.rank, runtime.world_size)
        torch.manual_seed(0)
        seen[half] = getattr(import_module(f"train.checks.pitfalls.{name}"), which)(team), team.said
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[float, list[str]]]:
    """Rank 0's figure and lines of each half that comes to its end."""
    first: dict[str, tuple[float, list[str]]] = run_ranks(2, _run_halves, HALVES)[0]
    return first


def _apart_after(steps: int, rates: tuple[list[float], list[float]]) -> float:
    """Two weights from 1, each moved by its own rate times their mean."""
    ours, theirs = 1.0, 1.0
    for step in range(steps):
        mean = (ours + theirs) / 2
        ours, theirs = ours - rates[0][step] * mean, theirs - rates[1][step] * mean
    return abs(ours - theirs)


def _batch_norm(*values: float) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return [(value - mean) / math.sqrt(variance + 1e-5) for value in values]


def _orders(epochs: list[int]) -> int:
    return len({tuple(torch.randperm(20, generator=torch.Generator().manual_seed(e)).tolist()[::2]) for e in epochs})


BY_HAND: dict[str, tuple[float | None, float]] = {
    "rank_zero_learning_rate": (_apart_after(10, ([0.1] * 5 + [0.05] * 5, [0.1] * 10)), 0.0),
    "rank_zero_validation": (None, 0.0),
    "forgotten_set_epoch": (_orders([0, 0, 0]), _orders([0, 1, 2])),
    "missing_no_sync": (4, 1),
    "clipping_before_unscale": (1.0 / torch.amp.GradScaler("cpu").get_scale(), math.hypot(3 / 5, 4 / 5)),
    "nominal_window": ((6 / 4) / 6, 1.0),
    "leftover_gradients": (((1 + 2 + 3 + 4 + 6) / 4) / ((1 + 2 + 3 + 4) / 4), 1.0),
    "padded_evaluation": (sum([1, 4, 9, 16, 25, 36, 49, 1]) / 8, sum([1, 4, 9, 16, 25, 36, 49]) / 7),
    "uneven_inputs": (None, 0 - sum([1, 4]) / 2 - sum([2, 5]) / 2 - 3),
    "different_seeds": (1.0, 0.0),
    "unsynchronised_batchnorm": (
        max(abs(a - b) for a, b in zip(_batch_norm(0, 2), _batch_norm(0, 2, 10, 12), strict=False)), 0.0,
    ),
    "mismatched_collectives": (None, sum([1, 2, 3]) + sum([1, 2, 0])),
    "barrier_in_a_branch": (None, 1),
    "unreduced_metrics": (sum([1, 2, 3]) / 3, sum([1, 2, 3, 10]) / 4),
}  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
def test_a_half_measures_what_comes_out_on_paper(half: str, seen: dict[str, tuple[float, list[str]]]) -> None:
    name, _, which = half.partition(":")
    by_hand = BY_HAND[name][which == "right"]
    assert seen[half][0] == pytest.approx(by_hand, rel=1e-4, abs=1e-5)
    assert getattr(LESSONS[name], which) == pytest.approx(by_hand, rel=1e-4, abs=1e-5)
    assert all(seen[half][1])


@pytest.mark.parametrize("name", MEASURED)
def test_the_halves_of_a_lesson_promise_different_figures(name: str) -> None:
    lesson = LESSONS[name]
    assert isinstance(lesson.wrong, float)
    assert not is_as_promised(lesson.wrong, lesson.right)
    assert not is_as_promised(lesson.right, lesson.wrong)


def test_what_lessons_tell_beside_their_figures(seen: dict[str, tuple[float, list[str]]]) -> None:
    """Traffic in bytes with the same weights at the end; seeds; the samples that count."""
    kib = (256 * 256 + 256) * 4 / 1024  # a bucket of float32
    for which, times in (("wrong", 4), ("right", 1)):
        (line,) = seen[f"missing_no_sync:{which}"][1]
        assert f"{3 * times} all-reduces in 3 updates, {times * kib:.0f} KiB an update" in line
    ends = {seen[f"missing_no_sync:{which}"][1][0].rpartition(" ")[2] for which in ("wrong", "right")}
    assert len(ends) == 1

    begun = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        begun.append(torch.cat([p.detach().flatten() for p in torch.nn.Linear(1, 1).parameters()]))
    apart = float((begun[0] - begun[1]).abs().max())
    assert apart > 0.1
    assert f"the seeds put {apart:.6f} between" in seen["different_seeds:wrong"][1][0]
    assert "8 losses were counted of 7 samples" in seen["padded_evaluation:wrong"][1][0]


# The lessons as files.


def test_every_lesson_has_its_file_and_every_file_its_promise() -> None:
    others = {"__init__", "promises", "ranks", "team", "trial"}
    assert {path.stem for path in FOLDER.glob("*.py")} - others == set(LESSONS) == set(BY_HAND)


@pytest.mark.parametrize("name", LESSONS)
def test_the_halves_of_a_lesson_are_of_one_shape(name: str) -> None:
    """Same signature, same last line, and most other lines too: they are to be read side by side."""
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    tree = ast.parse(text)
    halves = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    bodies = [[ast.unparse(node) for node in halves[which].body[1:]] for which in ("wrong", "right")]
    assert ast.unparse(halves["wrong"].args) == ast.unparse(halves["right"].args) == "team: Team"
    assert bodies[0][0].partition(" ")[0] == bodies[1][0].partition(" ")[0]
    assert bodies[0][-1].partition("(")[0] == bodies[1][-1].partition("(")[0] == "return told"
    assert bodies[0] != bodies[1]


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
def test_what_muster_does_about_it_is_where_it_is_said_to_be(lesson: Lesson) -> None:
    file, _, name = lesson.here[0].partition(":")
    node: Any = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)


def test_the_list_has_a_line_for_each_and_loads_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert pitfalls.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(LESSONS)
    for lesson, line in zip(LESSONS.values(), lines[1:], strict=True):
        assert f"{lesson.mistake}: {lesson.costs}" in line
    for module in ("__init__", "promises", "trial"):
        assert "torch" not in {
            name.partition(".")[0]
            for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }


def test_a_lesson_is_shown_and_an_unknown_one_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert pitfalls.main(["nominal_window", "--show"]) == 0
    assert capsys.readouterr().out == (FOLDER / "nominal_window.py").read_text()
    assert pitfalls.main(["nominal_widow"]) == 2
    assert "did you mean nominal_window?" in capsys.readouterr().err
    assert pitfalls.main(["elephant"]) == 2
    assert "lists them" in capsys.readouterr().err


# Under the agent, on ranks of their own.


@pytest.fixture(scope="module")
def tried() -> dict[str, dict[str, Result]]:
    """All lessons as the command runs them."""
    return dict(try_out(list(LESSONS)))


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_both_halves_are_as_promised_under_the_agent(name: str, tried: dict[str, dict[str, Result]]) -> None:
    wrong, right = tried[name]["wrong"], tried[name]["right"]
    assert wrong.is_as_promised, wrong
    assert right.is_as_promised, right
    assert right.figure == pytest.approx(BY_HAND[name][1], rel=1e-4, abs=1e-5)
    assert (wrong.figure is None) == (name in HANGING)
    assert wrong.took_s < 20
    assert right.took_s < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rank_zero_validation", "rank_zero_validation.py"),
        ("uneven_inputs", "uneven_inputs.py"),
        ("barrier_in_a_branch", "barrier_in_a_branch.py"),
    ],
)
def test_a_hang_is_found_by_our_watchdog_and_the_place_is_named(
    name: str, words: str, tried: dict[str, dict[str, Result]]
) -> None:
    wrong = tried[name]["wrong"]
    assert wrong.exit_code == 6
    assert wrong.verdict.startswith("hang: ")
    assert f"{words}:" in wrong.verdict
    assert "(wrong)" in wrong.verdict
    assert trial.HANG_S <= wrong.took_s < 20


@pytest.mark.slow
def test_what_is_not_as_promised_is_said_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A padded metric that were right, and a hang that is none."""
    no_hang = dataclasses.replace(LESSONS["barrier_in_a_branch"], right=2.0)
    monkeypatch.setitem(LESSONS, "padded_evaluation", dataclasses.replace(LESSONS["padded_evaluation"], wrong=20.0))
    monkeypatch.setitem(LESSONS, "unreduced_metrics", dataclasses.replace(no_hang, wrong="it is said to"))
    for name, happened in (("padded_evaluation", "17.625"), ("unreduced_metrics", "exit code 0, ")):
        assert pitfalls.main([name]) == 5
        said = capsys.readouterr().out
        assert "wrong: NOT as promised" in said
        assert f"happened  {happened}" in said
        assert "0 of 1 went wrong and right as promised" in said


@pytest.mark.slow
def test_the_command_tells_both_halves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = train("pitfalls", "padded_evaluation", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "promised  17.625 (140 / 7, or with the first sample once more (140 + 1) / 8)" in done.stdout
    assert "happened  17.625" in done.stdout
    assert "7 losses were counted of 7 samples; their sum is 140" in done.stdout
    assert done.stdout.rstrip().endswith("pitfalls: 1 of 1 went wrong and right as promised")
    assert list(tmp_path.glob("pitfalls-*")) == []
