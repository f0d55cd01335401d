"""The drill's own judgement: what counts as a fault, and what it does where a run does not end. Agents are played."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from train.checks import befall, drill
from train.checks.befall import DAMAGE, KILL_AGENT, KILL_ALL, KILL_RANK, TERM
from train.checks.drill import Drill
from train.checks.same import NotTheSameError, compare, weights_hash
from train.errors import UsageError

pytestmark = pytest.mark.timeout(60)

ENDS_AS_TOLD = "import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); print(flush=True); signal.pause()"
RANKS = """
import os, subprocess, sys
ranks = [subprocess.Popen(["sleep", "60"], env={"MUSTER_STATUS_PAGE": "x", "PATH": os.environ["PATH"]}) for _ in "ab"]
print(flush=True)
sys.exit(5 if ranks[0].wait() + ranks[1].wait() else 0)
"""


@contextlib.contextmanager
def played(script: str) -> Iterator[befall.Agent]:
    """An agent that is ready for what befalls it."""
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    try:
        agent.stdout.readline()
        yield agent
    finally:
        befall.end_all(agent)
        agent.wait()
        agent.stdout.close()


class Dice(random.Random):
    """Falls as it is told."""

    def __init__(self, kind: str) -> None:
        super().__init__(0)
        self.kind = kind

    def choice(self, seq: Any) -> Any:
        return self.kind if self.kind in seq else super().choice(seq)


def a_drill(folder: Path, kind: str, limit_s: float = 30.0) -> Drill:
    (folder / "run").mkdir()
    return Drill(folder, 2, [], Dice(kind), limit_s)


def over(agent: befall.Agent) -> None:
    agent.wait(30)


@pytest.mark.parametrize("kind", befall.KINDS)
def test_a_fault_that_comes_when_all_is_over_hits_nothing(tmp_path: Path, kind: str) -> None:
    with played("print(flush=True)") as agent:
        over(agent)
        assert befall.befall(kind, agent, tmp_path / "run", random.Random(0)) == ""
        deal = a_drill(tmp_path, kind)
        assert deal._deal(agent, "run", 0.0, 5) == 0
        assert deal.faults == []


def test_a_request_that_a_run_was_too_far_on_to_hear_does_not_count(tmp_path: Path) -> None:
    deal = a_drill(tmp_path, TERM)
    with played(ENDS_AS_TOLD.format(code=0)) as agent:
        assert deal._deal(agent, "run", 0.0, 5) == 0
    assert deal.faults == []


@pytest.mark.parametrize("code", [75, 8])
def test_a_request_that_is_met_counts(tmp_path: Path, code: int) -> None:
    deal = a_drill(tmp_path, TERM)
    with played(ENDS_AS_TOLD.format(code=code)) as agent:
        assert deal._deal(agent, "run", 0.0, 5) == code
    assert [(fault.kind, fault.ended_with) for fault in deal.faults] == [(TERM, code)]


@pytest.mark.parametrize("code", [1, 2, 5, 6, 7])
def test_a_request_with_another_end_fails_the_drill(tmp_path: Path, code: int) -> None:
    deal = a_drill(tmp_path, TERM)
    with (
        played(ENDS_AS_TOLD.format(code=code)) as agent,
        pytest.raises(NotTheSameError, match=f"run was dealt SIGTERM at step 0 and ended with {code}"),
    ):
        deal._deal(agent, "run", 0.0, 5)


def test_a_run_that_fails_by_itself_fails_the_drill(tmp_path: Path) -> None:
    deal = a_drill(tmp_path, TERM)
    with played("print(flush=True); raise SystemExit(6)") as agent:
        over(agent)
        with pytest.raises(NotTheSameError, match="run ended by itself with 6"):
            deal._deal(agent, "run", 0.0, 5)


def test_a_fault_is_called_what_it_was(tmp_path: Path) -> None:
    for kind, script, expected, codes in (
        (KILL_RANK, RANKS, KILL_RANK, {5}),
        (KILL_RANK, ENDS_AS_TOLD, KILL_AGENT, {-9}),  # no rank yet
        (KILL_AGENT, RANKS, KILL_AGENT, {-9}),
        (KILL_ALL, RANKS, KILL_ALL, {-9, 5}),
        (DAMAGE, RANKS, KILL_ALL, {-9, 5}),  # no checkpoint yet
    ):
        (folder := tmp_path / f"{kind}-{expected}-{len(script)}").mkdir()
        deal = a_drill(folder, kind)
        ranks: list[int] = []
        if kind == KILL_RANK and expected == KILL_RANK:
            script = script.replace("ranks[0].wait() + ranks[1].wait()", "os.wait()[1]")  # noqa: PLW2901 - as an agent
        with played(script) as agent:
            ranks = list(befall._ranks(agent))
            code = deal._deal(agent, "run", 0.0, 5)
            assert [fault.kind for fault in deal.faults] == [expected]
            assert code in codes
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_only_a_good_newest_checkpoint_with_a_good_one_before_it_is_damaged(tmp_path: Path) -> None:
    import torch

    from train.checkpoint import Checkpoints, verify
    from train.errors import CheckpointError

    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    answers = []
    for step in (None, 5, 10, None, 20):
        if step is not None:
            checkpoints.save(step, {"model": torch.full((9,), float(step))})
        with played(RANKS) as agent:
            ranks = list(befall._ranks(agent))
            answers.append(befall.befall(DAMAGE, agent, tmp_path / "run", random.Random(3)))
            assert len(ranks) == 2
    assert answers == [KILL_ALL, KILL_ALL, DAMAGE, KILL_ALL, KILL_ALL]  # 10 is damaged already, and then before 20
    with pytest.raises(CheckpointError):
        verify(checkpoints.folder / "step-00000010")
    verify(checkpoints.folder / "step-00000020")


def test_what_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deal = a_drill(tmp_path, TERM, limit_s=0.2)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    started: list[befall.Agent] = []
    real = subprocess.Popen

    def popen(command: list[str], **more: Any) -> Any:
        started.append(real([sys.executable, "-c", deaf], **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(NotTheSameError, match=r"untouched did not end within 0 s \(--limit-s\)"):
        deal.run(1)
    assert [agent.returncode for agent in started] == [-9]
    with pytest.raises(NotTheSameError, match="disturbed-1 did not end within 0 s"):
        deal._disturb("disturbed-1", 0, 0.0)  # all faults are dealt
    assert [agent.returncode for agent in started] == [-9, -9]


def test_runs_that_no_fault_can_hit_are_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deal = a_drill(tmp_path, TERM)
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", ""], **more))
    monkeypatch.setattr(drill, "compare", lambda *_: None)
    deal._dice.uniform = lambda *_: 20.0  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"train\.steps: 10 runs were through before a fault hit them"):
        deal.run(1)


def test_files_that_are_missing_or_cut_are_told_as_what_they_are(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(NotTheSameError, match="one has no checkpoint"):
        weights_hash(tmp_path / "one")
    import torch

    from train.checkpoint import Checkpoints

    for name in ("one", "other"):
        state = {key: torch.ones(1) for key in ("model", "optimizer", "scaler", "progress")}
        Checkpoints(tmp_path / name / "checkpoints", keep=1).save(1, state)
    with pytest.raises(NotTheSameError, match=r"one has no metrics\.jsonl"):
        compare(tmp_path / "one", tmp_path / "other", 1)
    for name in ("one", "other"):
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with pytest.raises(NotTheSameError, match=r"metrics\.jsonl has a line that is cut short"):
        compare(tmp_path / "one", tmp_path / "other", 1)


def test_an_error_of_the_machine_is_no_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", "ddp", "--model.name", "mlp", "--data.name", "digits", "--runs-dir"]
    (tmp_path / "file").write_text("")
    assert drill.main([*flags, str(tmp_path / "file")]) == 2
    assert f"--runs-dir: cannot make {tmp_path / 'file'}/drill-" in capsys.readouterr().err

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable", "python")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    assert drill.main([*flags, str(tmp_path)]) == 5
    said = capsys.readouterr().err
    assert said == "drill: nothing is proven: [Errno 11] Resource temporarily unavailable: 'python'\n"
