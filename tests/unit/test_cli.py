"""`python -m train`: what it says of itself, and how recipes, files and flags become one config."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.ranks import ROOT, clean_environment, run_together, train
from train import __version__
from train.cli import main
from train.config import Config, field_names
from train.errors import UsageError
from train.options import read_config, split_launch_options
from train.recipes import recipes
from train.rules import problems

RECIPES = ("accumulation", "amp", "baseline", "ddp", "dp", "manual")


def said(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `python -m train ARGV…`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
    return code, out.getvalue(), err.getvalue()


def leaves(config: Config) -> dict[str, object]:
    """The config's values by dotted name."""
    sections = config.as_dict()
    return {name: sections[name.split(".")[0]][name.split(".")[1]] for name in field_names()}


def file_with(folder: Path, text: str, name: str = "job.yaml") -> str:
    """Path of a config file with that text."""
    (folder / name).write_text(text)
    return str(folder / name)


def test_no_command_is_refused_with_the_usage() -> None:
    code, out, err = said()
    assert (code, out) == (2, "")
    assert "no command given" in err
    assert "usage: python -m train COMMAND" in err


def test_an_unknown_command_is_named_and_refused_with_the_usage() -> None:
    code, out, err = said("rum", "--config", "ddp")
    assert (code, out) == (2, "")
    assert "'rum'" in err
    assert re.search(r"^  run ", err, re.MULTILINE)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str) -> None:
    code, out, err = said(flag)
    assert (code, err) == (0, "")
    assert re.search(r"^  run +\w", out, re.MULTILINE)
    assert "--config ddp" in out


def test_version_is_the_package_s() -> None:
    assert said("--version") == (0, f"muster {__version__}\n", "")


def test_help_of_run_teaches_every_field_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = said("run", "--help")
    assert code == 0
    # One paragraph an option, up to the next one or to the next section's heading.
    told = {
        name: " ".join(words.split())
        for name, words in re.findall(r"^  --(\w+\.\w+)(.*?)(?=^  -|^\S|^$)", out, re.M | re.S)
    }
    assert "go on though" in told.pop("resume.allow")
    assert list(told) == field_names()
    for name, default in leaves(Config()).items():
        words = re.sub(r"^ *(\{[^}]*\}|\S+)", "", told[name])
        assert len(words.split()) >= 3, f"--{name} is not explained: {words!r}"
        if default not in (None, [], {}):
            shown = str(default).lower() if isinstance(default, bool) else str(default)
            assert shown in words, f"--{name} does not tell its default {default!r}: {words!r}"


def test_help_of_run_teaches_launch_options_recipes_and_exit() -> None:
    _, out, _ = said("run", "--help")
    for option in dataclasses.fields(split_launch_options([])[0]):
        assert option.name == "resume_allow" or f"--{option.name.replace('_', '-')}" in out
    for recipe in RECIPES:
        assert re.search(rf"^recipes: .*\b{recipe}\b", out, re.MULTILINE)


def test_help_offers_no_option_that_is_not_explained() -> None:
    _, out, _ = said("run", "--help")
    sections = [section.name for section in dataclasses.fields(Config)]
    assert re.findall(rf"^  --(?:{'|'.join(sections)}) .*", out, re.MULTILINE) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "ddp", "--model.args", "{depth: 3, names: [a, b]}", "--model.name", "own:model"],
        ["--config", "amp", "--optim.betas", "[0.8, 0.9]", "--data.paths", "[a b.txt, 'ü:.txt']", "--optim.lr", "1e-5"],
        ["--batch.micro_size", "4", "--data.cache_dir", "null", "--train.tensorboard", "false"],
    ],
)
def test_what_print_config_prints_reads_back_as_the_same_config(argv: list[str], tmp_path: Path) -> None:
    code, out, err = said("run", *argv, "--print_config")
    assert (code, err) == (0, "")
    assert list(yaml.safe_load(out)) == [section.name for section in dataclasses.fields(Config)]
    assert read_config(["--config", file_with(tmp_path, out)]) == read_config(argv)


def test_the_config_of_a_run_folder_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = read_config(["--config", "ddp", "--optim.betas", "[0.5, 0.75]"])
    path = file_with(tmp_path, yaml.safe_dump(config.as_dict(), sort_keys=False))
    assert read_config(["--config", path]) == config
    assert read_config(["--config", path]).digest() == config.digest()


def test_a_file_wins_over_the_recipe_before_it_and_flags_over_both(tmp_path: Path) -> None:
    recipe = read_config(["--config", "ddp"])
    path = file_with(tmp_path, "strategy: {bucket_mb: 3}\noptim: {lr: 0.5, momentum: 0.25}\n")
    config = read_config(["--config", "ddp", "--config", path, "--optim.lr", "0.125"])
    assert config == dataclasses.replace(
        recipe,
        strategy=dataclasses.replace(recipe.strategy, bucket_mb=3.0),
        optim=dataclasses.replace(recipe.optim, lr=0.125, momentum=0.25),
    )


def test_of_several_files_the_last_to_name_a_field_wins(tmp_path: Path) -> None:
    first = file_with(tmp_path, "optim: {lr: 0.5, momentum: 0.25}\n", "first.yaml")
    second = file_with(tmp_path, "optim: {lr: 0.125}\n", "second.yaml")
    there, back = (read_config(["--config", a, "--config", b]).optim for a, b in ((first, second), (second, first)))
    assert (there.lr, there.momentum) == (0.125, 0.25)
    assert (back.lr, back.momentum) == (0.5, 0.25)


def test_a_recipe_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path, "train: {seed: 7}\n", "ddp")
    monkeypatch.chdir(tmp_path)
    assert read_config(["--config", "ddp"]).train.seed != 7
    assert read_config(["--config", "./ddp"]).train.seed == 7


def test_an_equals_sign_is_as_good_as_a_space() -> None:
    spaced = read_config(["--config", "ddp", "--batch.global_size", "24", "--data.name", "own:data"])
    assert read_config(["--config=ddp", "--batch.global_size=24", "--data.name=own:data"]) == spaced
    assert spaced.batch.global_size == 24


def test_a_single_argument_of_one_s_own_function_can_be_given_by_name() -> None:
    config = read_config(["--model.name", "own:model", "--model.args.depth", "3", "--model.args.name", "deep"])
    assert config.model.args == {"depth": 3, "name": "deep"}


LAUNCH = {
    "rank": "1", "world-size": "2", "local-rank": "1", "master-addr": "n1", "master-port": "29400",
    "run-id": "r", "runs-dir": "d", "resume": "none",
}  # fmt: skip


@pytest.mark.parametrize("spelling", [str, lambda name: name.replace("-", "_")], ids=["dashes", "underscores"])
@pytest.mark.parametrize("joined", [True, False], ids=["equals", "space"])
def test_launch_options_are_taken_out_in_either_spelling(spelling: type[str], joined: bool) -> None:
    words = [(f"--{spelling(name)}", value) for name, value in LAUNCH.items()]
    argv = [part for flag, value in words for part in ([f"{flag}={value}"] if joined else [flag, value])]
    options, rest = split_launch_options(["--config", "ddp", *argv, "--optim.lr=1"])
    assert rest == ["--config", "ddp", "--optim.lr=1"]
    found = {name.replace("_", "-"): str(value) for name, value in dataclasses.asdict(options).items()}
    assert found == {**LAUNCH, "resume-allow": "()"}


def test_fields_that_may_differ_are_known_fields_or_sections() -> None:
    options, _ = split_launch_options(["--resume.allow", "train.seed, data,model.width"])
    assert options.resume_allow == ("train.seed", "data", "model.width")
    with pytest.raises(UsageError) as caught:
        split_launch_options(["--resume.allow=train.sed,nothing"])
    assert caught.value.problems == [
        "--resume.allow: there is no field 'train.sed'; did you mean train.seed?",
        "--resume.allow: there is no field 'nothing'",
    ]


def test_the_run_s_name_and_folder_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_RUN_ID", "from-env")
    monkeypatch.setenv("MUSTER_RUNS_DIR", "/env")
    options, _ = split_launch_options([])
    assert (options.run_id, options.runs_dir) == ("from-env", "/env")
    options, _ = split_launch_options(["--run-id", "flag", "--runs-dir", "f"])
    assert (options.run_id, options.runs_dir) == ("flag", "f")


def test_the_six_recipes_are_there() -> None:
    assert tuple(recipes()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_can_run(name: str) -> None:
    config = read_config(["--config", name])
    assert problems(config, 1) == []
    if config.strategy.name in ("ddp", "manual"):
        assert [problems(config, world_size) for world_size in (2, 4)] == [[], []]


def test_each_recipe_differs_from_the_baseline_in_what_it_is_named_for_alone() -> None:
    baseline = leaves(read_config(["--config", "baseline"]))
    differences = {
        name: {key for key, value in leaves(read_config(["--config", name])).items() if value != baseline[key]}
        for name in RECIPES
    }
    assert differences["baseline"] == set()
    assert baseline["strategy.name"] == "baseline"
    for name in ("dp", "ddp", "manual"):
        assert differences[name] == {"strategy.name"}
        assert read_config(["--config", name]).strategy.name == name
    # Precision and accumulation are axes of their own: the strategy may be ddp, so that they run on several ranks too.
    assert differences["amp"] - {"strategy.name"} == {"precision.name"}
    assert read_config(["--config", "amp"]).precision.name in ("bf16", "fp16")
    accumulation = read_config(["--config", "accumulation"])
    batch = differences["accumulation"] - {"strategy.name", "train.steps"}
    assert batch and batch <= {"batch.accumulation", "batch.micro_size", "batch.global_size"}
    per_micro = accumulation.batch.micro_size or accumulation.batch.global_size
    assert (accumulation.batch.accumulation or accumulation.batch.global_size / per_micro) > 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_why_it_is_so(name: str) -> None:
    assert recipes()[name].read_text().startswith("# ")


def test_the_console_script_is_the_command_line() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"train": "train.cli:main"}
    module, _, function = scripts["train"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


def test_a_refused_config_is_told_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from train.cli import main\n"
        "code = main(['run', '--train.steps', '0', '--data.name', 'digits'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)\n"
    )
    done = run_together([[sys.executable, "-c", code]], [clean_environment()])[0]
    assert done.returncode == 2, done.stdout
    assert "train.steps" in done.stdout
    assert "data.name" in done.stdout


def test_python_m_train_ends_with_the_command_s_code() -> None:
    done = train("run", "--optim.lrr", "1")
    assert done.returncode == 2, done.stdout
    assert "did you mean optim.lr?" in done.stdout


def test_every_unknown_field_is_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_config(["--optim.lrr", "1", "--train.stepz=3", "--nonsense", "x"])
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["optim.lrr", "train.stepz", "nonsense"]
