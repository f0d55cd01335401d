"""What a rank tells its node agent, read from the agent's side; and that without an agent nothing is left behind."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import config_of, make_job
from train import evidence, loop
from train.config import RuntimeConfig
from train.errors import UsageError
from train.health import Health
from train.seam import STATUS_PAGE, Phase, StatusPage
from train.state import Job, restore, state_of

WAITS = RuntimeConfig(
    start_timeout_s=1, first_step_timeout_s=3, step_timeout_s=2, eval_timeout_s=4, save_timeout_s=5
)  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> StatusPage:
    """As an agent makes it for a rank that is about to be started."""
    return StatusPage.make(tmp_path / "rank0.page")


def rank_of(page: StatusPage) -> Health:
    """The rank's side of that page, in a mapping of its own."""
    return Health(page.path)


def test_a_page_says_nothing_until_the_rank_starts(page: StatusPage) -> None:
    health = rank_of(page)
    assert not page.read().is_ours
    health.start(WAITS)
    assert page.read()[:3] == (True, 0, Phase.STARTING)
    assert page.read().budget_s == 1
    assert page.read().saved_step == -1


def test_beats_tell_step_and_time_and_phases_their_budget(page: StatusPage) -> None:
    health = rank_of(page)
    health.start(WAITS)
    budgets = {}
    for step, phase in enumerate(Phase):
        before_s = time.monotonic()
        health.enter(phase, step)
        told = page.read()
        assert (told.phase, told.step) == (phase, step)
        assert before_s <= told.progress_s <= time.monotonic()
        budgets[phase.words] = told.budget_s
        health.beat(step + 100)
        assert (page.read().phase, page.read().step) == (phase, step + 100)
        assert page.read().progress_s > told.progress_s
        assert page.read().budget_s == told.budget_s
    assert budgets == {"starting": 1, "first step": 3, "step": 2, "evaluation": 4, "saving": 5, "ending": 5}
    health.saved(17)
    assert page.read().saved_step == 17
    assert health.step == page.read().step


def test_the_stop_flag_reaches_the_rank(page: StatusPage) -> None:
    health = rank_of(page)
    assert not health.stop_asked
    page.ask_to_stop()
    assert health.stop_asked
    health.start(WAITS)  # what was asked before the rank came so far stays asked
    assert health.stop_asked


def test_a_page_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    assert not Health.from_environment({}).has_agent
    assert not Health.from_environment({STATUS_PAGE: ""}).has_agent
    (tmp_path / "empty").touch()
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(UsageError) as caught:
            Health.from_environment({STATUS_PAGE: str(path)})
        assert f"MUSTER_STATUS_PAGE={path} is no status page" in str(caught.value)


def test_files_beside_the_page(page: StatusPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    health = rank_of(page)
    health.tell_run_folder(Path("runs/ü x"))
    assert (tmp_path / "rank0.run").read_text(encoding="utf-8") == f"{tmp_path}/runs/ü x"
    health.start(WAITS)
    health.beat(6)
    health.tell_failure("exception", 5, "ValueError: ü\nsecond")
    assert json.loads((tmp_path / "rank0.failure.json").read_text()) == {
        "kind": "exception", "exit_code": 5, "words": "ValueError: ü\nsecond", "step": 6,
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.page", "rank0.run", "rank0.failure.json"}


def test_a_file_that_cannot_be_written_is_missed_not_fatal(page: StatusPage, tmp_path: Path) -> None:
    (tmp_path / "rank0.run").mkdir()
    rank_of(page).tell_run_folder(Path("runs/x"))
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.page", "rank0.run"}


def test_without_an_agent_nothing_is_written_and_no_thread_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    health = Health.from_environment({})
    health.start(WAITS)
    health.beat(3)
    health.tell_run_folder(tmp_path)
    health.tell_failure("usage", 2, "words")
    assert (health.step, health.stop_asked, health.has_agent) == (3, False, False)
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


def test_asked_for_evidence_a_rank_tells_where_its_main_thread_is(page: StatusPage, tmp_path: Path) -> None:
    health = Health.from_environment({STATUS_PAGE: str(page.path)})
    health.start(WAITS)
    health.enter(Phase.EVALUATION, 12)
    time.sleep(0.6)
    assert not (tmp_path / "rank0.flight.json").exists()  # nobody has asked
    page.ask_for_evidence()
    deadline = time.monotonic() + 20
    while not (tmp_path / "rank0.flight.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = json.loads((tmp_path / "rank0.flight.json").read_text())
    assert (told["step"], told["phase"]) == (12, "evaluation")
    here = f"{__file__}:"
    name = "test_asked_for_evidence_a_rank_tells_where_its_main_thread_is"
    assert told["at"].startswith(here) and told["at"].endswith(f" {name}")
    assert told["stack"][-1] == told["at"]
    assert abs(told["time_s"] - time.time()) < 60


def test_evidence_fits_in_a_message_and_keeps_the_newest() -> None:
    def groups(count: int, sizes: list[list[int]]) -> list[dict[str, Any]]:
        entries = [{"seq": seq, "sizes": sizes} for seq in range(1, 51)]
        return [{"name": str(n), "last": 50, "entries": entries} for n in range(count)]

    told = json.loads(evidence.fit({"at": "x"}, groups(3, [[7]])))
    assert told["at"] == "x"
    assert [[entry["seq"] for entry in group["entries"]] for group in told["groups"]] == [list(range(31, 51))] * 3
    for many in (groups(3, [[1 << 40] * 100] * 4), groups(300, [[1 << 40] * 100]), groups(2, [[1] * 30_000])):
        text = evidence.fit({"at": "x"}, many)
        assert len(text) < 48_000
        for group in json.loads(text)["groups"]:
            assert group["entries"][-1]["seq"] == 50


class Recorded(Health):
    """Keeps what the loop tells."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    def beat(self, step: int) -> None:
        """Also kept."""
        super().beat(step)
        self.told.append((f"beat in {self.phase.words}", step))

    def enter(self, phase: Phase, step: int) -> None:
        """Also kept."""
        super().enter(phase, step)
        self.told.append((phase.words, step))

    def saved(self, step: int) -> None:
        """Also kept."""
        super().saved(step)
        self.told.append(("saved", step))


def recorded_job() -> tuple[Job, list[tuple[str, int]]]:
    """Three steps, an evaluation and a checkpoint every second one; and what its health will be told."""
    job = make_job(config_of(
        "model.name=mlp", "data.name=classification", "data.size=20", "batch.global_size=8", "batch.micro_size=2",
        "train.steps=3", "train.eval_every=2", "train.save_every=2",
    ))  # fmt: skip
    job.health = recorded = Recorded()
    return job, recorded.told


def test_the_loop_tells_each_step_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = recorded_job()
    monkeypatch.setattr(job.runtime, "end_first_step", lambda: told.append(("time-out of every step", 1)))
    loop.fit(job)
    batches = -(-len(job.data.val) // 2)

    def evaluation(step: int) -> list[tuple[str, int]]:
        return [("evaluation", step), *[("beat in evaluation", step)] * batches, ("step", step)]

    def last_save(step: int) -> list[tuple[str, int]]:
        return [("saving", step), ("saved", step), ("step", step)]

    # The save of step 2 is not this rank's: it keeps no checkpoints, as all but rank 0.
    assert told == [
        ("first step", 0), ("beat in first step", 1), ("time-out of every step", 1), ("step", 1),
        ("beat in step", 2), *evaluation(2), ("beat in step", 3), *evaluation(3), *last_save(3),
    ]  # fmt: skip


def test_a_rank_that_goes_on_tells_from_where() -> None:
    done, _ = recorded_job()
    loop.fit(done)
    job, told = recorded_job()
    restore(job, state_of(done))
    assert told == [("beat in starting", 3), ("saved", 3)]
