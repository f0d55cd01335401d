"""Which folder a run gets, who may write it, and what it says."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.config import Config
from train.errors import UsageError
from train.options import LaunchOptions
from train.run_folder import RunFolder, is_finished, open_run, refuse_other_config

CONFIG = Config()


def changed(config: Config, dotted: str, value: Any) -> Config:
    section, name = dotted.split(".")
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


OTHER = changed(CONFIG, "train.seed", 7)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def opened(runs: Path, config: Config = CONFIG, suggested: str | None = None, **more: Any) -> RunFolder:
    return open_run(LaunchOptions(runs_dir=str(runs), **more), config, suggested)


def release(folder: RunFolder) -> None:
    folder._lock.close()  # what the kernel does when the process ends


def past_run(runs: Path, name: str, age: float, config: Config = CONFIG, outcome: str | None = None) -> Path:
    """A run of before: begun `age` seconds ago, ended with `outcome`, or killed where that is None."""
    folder = opened(runs, config, run_id=name)
    folder.describe(config, {"config_digest": config.digest()})
    if outcome is not None:
        folder.conclude(outcome, 0, 10)
    release(folder)
    begun = (folder.path / "environment.json").stat().st_mtime - age
    os.utime(folder.path / "environment.json", (begun, begun))
    return folder.path


# Which one


def test_a_first_run_gets_a_new_folder_named_after_what_it_trains(runs: Path) -> None:
    folder = opened(runs)
    assert re.fullmatch(r"baseline-gpt-text-\d{8}-\d{6}-[0-9a-f]{4}", folder.run_id)
    assert folder.path == runs / folder.run_id
    assert folder.path.is_dir()


def test_names_of_your_own_functions_make_plain_folder_names(runs: Path) -> None:
    config = changed(changed(CONFIG, "model.name", "my.models:build"), "data.name", "my_data:open")
    assert opened(runs, config).run_id.startswith("baseline-my_models_build-my_data_open-")


def test_two_new_runs_at_once_have_folders_of_their_own(runs: Path) -> None:
    assert opened(runs).path != opened(runs).path


def test_the_newest_unfinished_run_of_the_same_config_goes_on(runs: Path) -> None:
    past_run(runs, "a-old", 300)
    newest = past_run(runs, "b-newest", 100)
    past_run(runs, "c-older", 200)
    assert opened(runs).path == newest


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
def test_a_failed_or_stopped_run_goes_on(runs: Path, outcome: str) -> None:
    path = past_run(runs, "before", 100, outcome=outcome)
    assert opened(runs).path == path


def test_a_finished_run_is_left_alone(runs: Path) -> None:
    old = past_run(runs, "old", 200)
    past_run(runs, "done", 100, outcome="finished")
    assert opened(runs).path == old


@pytest.mark.parametrize("suggested", [None, "slurm-7"])
def test_an_unfinished_run_that_cannot_be_read_for_now_is_no_reason_to_begin_another(
    runs: Path, monkeypatch: pytest.MonkeyPatch, suggested: str | None
) -> None:
    past_run(runs, "slurm-7", 200)
    real = Path.read_text

    def failing(path: Path, **more: Any) -> str:
        if path.name == "environment.json":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, **more)

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(UsageError, match=r"cannot write a run folder in .*Stale file handle"):
        opened(runs, suggested=suggested)
    assert [path.name for path in runs.iterdir()] == ["slurm-7"]


def test_a_run_of_another_config_is_left_alone(runs: Path) -> None:
    past_run(runs, "other", 100, OTHER)
    assert opened(runs).run_id != "other"
    assert opened(runs, OTHER).run_id == "other"


def test_a_run_that_another_job_holds_is_left_alone(runs: Path) -> None:
    older = past_run(runs, "older", 200)
    past_run(runs, "newer", 100)
    first = opened(runs)
    assert first.run_id == "newer"
    second = opened(runs)
    assert second.path == older
    third = opened(runs)
    assert third.run_id not in ("newer", "older")


def test_a_folder_that_says_nonsense_is_left_alone(runs: Path) -> None:
    for name, content in (("broken", '{"config_dig'), ("list", "[1]"), ("other", '{"torch": "2"}')):
        (runs / name).mkdir(parents=True)
        (runs / name / "environment.json").write_text(content)
    assert opened(runs).run_id not in ("broken", "list", "other")


def test_asked_to_start_anew_it_does(runs: Path) -> None:
    past_run(runs, "before", 100)
    assert opened(runs, resume="none").run_id != "before"


def test_a_name_given_wins_over_one_suggested_and_over_unfinished_runs(runs: Path) -> None:
    past_run(runs, "before", 100)
    assert opened(runs, suggested="slurm-77").run_id == "slurm-77"
    assert opened(runs, suggested="slurm-77", run_id="mine").run_id == "mine"


def test_a_suggested_name_finds_its_run_again(runs: Path) -> None:
    first = opened(runs, suggested="slurm-77")
    (first.path / "kept").write_text("")
    release(first)
    assert (opened(runs, suggested="slurm-77").path / "kept").exists()


# Who may


def test_a_run_in_use_is_refused_naming_its_holder(runs: Path) -> None:
    holder = opened(runs, run_id="mine")
    with pytest.raises(UsageError) as caught:
        opened(runs, run_id="mine")
    words = str(caught.value)
    assert words.startswith(f"--run-id: run mine is in use by process {os.getpid()} on {socket.gethostname()} since ")
    assert words.endswith("stop that job, or give another --run-id")
    release(holder)
    assert opened(runs, run_id="mine").run_id == "mine"


def test_a_refused_job_does_not_take_the_holders_name_away(runs: Path) -> None:
    opened_once = opened(runs, run_id="mine")
    before = (runs / "mine" / ".lock").read_text()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"process {os.getpid()}"):
            opened(runs, run_id="mine")
    assert (runs / "mine" / ".lock").read_text() == before
    release(opened_once)


def test_a_runs_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "way").write_text("a file in the way")
    for place in (tmp_path / "way", tmp_path / "way" / "below"):
        with pytest.raises(UsageError, match=re.escape(f"--runs-dir: cannot write a run folder in {place}: ")):
            opened(place)


def test_a_file_of_the_runs_name_is_refused(runs: Path) -> None:
    runs.mkdir()
    (runs / "mine").write_text("a file in the way")
    with pytest.raises(UsageError, match="--runs-dir: cannot write a run folder in "):
        opened(runs, run_id="mine")


# Another config


def refused_fields(folder: RunFolder, before: Any, now: Config) -> list[str]:
    with pytest.raises(UsageError) as caught:
        refuse_other_config(before, now, f"run {folder.run_id}")
    differs = caught.value.problems[1:]
    fields = [line.split(":")[0] for line in differs]
    assert caught.value.problems[0] == (
        f"run {folder.run_id} was made with another config; go on with its own, start anew (--resume none), or go on "
        f"all the same, to other numbers (--resume.allow {','.join(fields)})"
    )
    refuse_other_config(before, now, "it", fields)
    refuse_other_config(before, now, "it", [field.split(".")[0] for field in fields])
    for missing in fields:
        with pytest.raises(UsageError, match=re.escape(f"--resume.allow {missing})")):
            refuse_other_config(before, now, "it", [field for field in fields if field != missing])
    return differs


def test_the_same_config_may_go_on() -> None:
    saved = json.loads(json.dumps(CONFIG.as_dict()))
    refuse_other_config(saved, CONFIG, "it")  # raises nothing
    assert saved == CONFIG.as_dict()


def test_a_differing_config_is_refused_naming_every_field(runs: Path) -> None:
    now = changed(changed(changed(CONFIG, "model.layers", 3), "data.args", {"a": 1}), "train.seed", 7)
    assert refused_fields(opened(runs), CONFIG.as_dict(), now) == [
        "model.layers: it has None, this config 3",
        "data.args: it has {}, this config {'a': 1}",
        "train.seed: it has 1337, this config 7",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.name", "mlp"), ("model.preset", "small"), ("model.args", {"x": 2}), ("model.loss", "a:b"),
        ("data.name", "digits"), ("data.paths", ["x"]), ("data.val_fraction", 0.5), ("data.drop_last", True),
        ("data.block_size", 64), ("batch.global_size", 999), ("train.seed", 1),
    ],
)  # fmt: skip
def test_what_decides_the_numbers_may_not_change(runs: Path, field: str, value: Any) -> None:
    fields = refused_fields(opened(runs), CONFIG.as_dict(), changed(CONFIG, field, value))
    assert [words.split(":")[0] for words in fields] == [field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.steps", 999), ("train.epochs", 9), ("optim.lr", 9.0), ("strategy.name", "ddp"),
        ("precision.name", "bf16"), ("batch.micro_size", 1), ("batch.accumulation", 2), ("data.loader", "workers"),
        ("data.workers", 5), ("data.cache_dir", "/x"), ("runtime.device", "cpu"), ("model.compile", True),
        ("model.checkpoint_activations", True), ("train.save_every", 7),
    ],
)  # fmt: skip
def test_what_only_moves_or_prolongs_a_run_may_change(field: str, value: Any) -> None:
    refuse_other_config(CONFIG.as_dict(), changed(CONFIG, field, value), "it")


# What it says


def test_a_run_describes_itself(runs: Path) -> None:
    folder = opened(runs)
    config = changed(CONFIG, "data.paths", ["ä b.txt"])
    folder.describe(config, {"config_digest": config.digest(), "hosts": ["a", "b"]})
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == config.as_dict()
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment == {"config_digest": config.digest(), "hosts": ["a", "b"]}


def test_going_on_elsewhere_is_told(runs: Path) -> None:
    folder = opened(runs)
    assert folder.describe(CONFIG, {"torch": "2.13.0", "threads": 1, "hosts": ["a"]}) == []
    told = folder.describe(CONFIG, {"torch": "2.14.0", "threads": 1, "hosts": ["b"]})
    assert told == ["torch was '2.13.0' and is '2.14.0'"]


def test_a_run_that_goes_on_has_no_verdict_any_more(runs: Path) -> None:
    folder = opened(runs)
    folder.conclude("finished", 0, 5)
    folder.describe(CONFIG, {})
    assert not (folder.path / "verdict.json").exists()


def test_a_new_folder_of_a_refused_job_goes_and_an_old_one_stays(runs: Path) -> None:
    folder = opened(runs)
    folder.release()
    assert not folder.path.exists()
    folder = opened(runs, suggested="old")
    folder.describe(CONFIG, {})
    folder._lock.close()
    again = opened(runs, suggested="old")
    again.release()
    assert (again.path / "config.yaml").exists()


def test_what_somebody_has_put_into_a_folder_stays_though_the_job_is_refused(runs: Path) -> None:
    kept = runs / "copied" / "checkpoints" / "step-00000005" / "state.pt"
    kept.parent.mkdir(parents=True)
    kept.write_text("days of work")
    opened(runs, run_id="copied").release()
    assert kept.read_text() == "days of work"
    assert not (runs / "copied" / ".lock").exists()


def test_another_job_of_the_same_allocation_gets_a_name_of_its_own(runs: Path) -> None:
    folder = opened(runs, suggested="slurm-7")
    folder.describe(CONFIG, {"config_digest": CONFIG.digest()})
    other = changed(CONFIG, "model.layers", 3)
    assert opened(runs, other, suggested="slurm-7").run_id == f"slurm-7-{other.digest()[:6]}"


def test_a_verdict_has_all_fields_of_the_contract(runs: Path) -> None:
    folder = opened(runs)
    folder.conclude("failed", 5, 412, cause="out of memory", rank=3)
    assert json.loads((folder.path / "verdict.json").read_text()) == {
        "outcome": "failed", "exit_code": 5, "cause": "out of memory", "host": None, "node_rank": None, "rank": 3,
        "step": 412, "evidence": [], "advice": None,
    }  # fmt: skip
    assert not is_finished(folder.path)
    folder.conclude("finished", 0, 500)
    assert is_finished(folder.path)
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "verdict.json"]


@pytest.mark.parametrize("content", ["", "[]", "null", '{"outcome": "fini', '{"outcome": "stopped"}'])
def test_only_a_whole_verdict_of_an_end_is_one(tmp_path: Path, content: str) -> None:
    assert not is_finished(tmp_path)
    (tmp_path / "verdict.json").write_text(content)
    assert not is_finished(tmp_path)
