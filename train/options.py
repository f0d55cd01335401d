"""Recipes, YAML files and the command line become one `Config`; or every problem at once.

jsonargparse does the parsing. It stops at its first error, so a failed parse is looked at again, one key
at a time, to tell all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from train import rules
from train.config import Config, field_names
from train.diagnosis import build, diagnose, flatten
from train.errors import UsageError
from train.recipes import find_config, recipes
from train.seam import RUN_ID, RUNS_DIR

set_parsing_settings(docstring_parse_attribute_docstrings=True)

EPILOG = """launch options (all ranks: the same config; each rank: its own identity):
  --rank, --world-size, --master-addr, --master-port, --local-rank
                        who this process is, where nothing sets the usual variables
  --run-id NAME         name of the run folder (default: the newest unfinished run of the same config, else new)
  --runs-dir FOLDER     where run folders are (default: runs)
  --resume auto|none|CHECKPOINT
                        auto: go on from the run's newest checkpoint; none: a new run
  --resume.allow FIELD,…
                        go on though these fields (or sections, as data) are others than the run's

recipes: {recipes}
examples:
  python -m train run --config ddp --batch.global_size 256 --optim.lr 3e-4
  torchrun --nproc-per-node 2 -m train run --config ddp
"""


@dataclass(frozen=True)
class LaunchOptions:
    """What may differ between ranks or starts of the same job, and so is no part of the config."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    runs_dir: str = "runs"
    resume: str = "auto"
    resume_allow: tuple[str, ...] = ()
    """Fields of the config, or sections, in which a run that goes on may differ."""


def split_launch_options(argv: Sequence[str]) -> tuple[LaunchOptions, list[str]]:
    """Take the launch options out of a command line. Raises UsageError on a bad one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, kind in (
        ("rank", int),
        ("world-size", int),
        ("local-rank", int),
        ("master-addr", str),
        ("master-port", int),
        ("run-id", str),
        ("runs-dir", str),
        ("resume", str),
        ("resume.allow", str),
    ):
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, type=kind, default=None)
    try:
        found, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        option = (error.argument_name or "option").split("/")[0]
        if "invalid int value" in error.message:
            raise UsageError(f"{option}: must be a whole number, but is {error.message.split(': ')[-1]}") from None
        raise UsageError(f"{option}: a value must follow {option}") from None
    given = {name: value for name, value in vars(found).items() if value is not None}
    named = "--run-id" if "run_id" in given else RUN_ID
    if "resume.allow" in given:
        given["resume_allow"] = _fields_named(given.pop("resume.allow"))
    given.setdefault("run_id", os.environ.get(RUN_ID) or None)
    given.setdefault("runs_dir", os.environ.get(RUNS_DIR) or "runs")
    options = LaunchOptions(**given)
    if options.run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", options.run_id):
        raise UsageError(f"{named}: {options.run_id!r} must be letters, digits, '.', '_' or '-' (at most 128)")
    return options, rest


def _fields_named(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = {*field_names(), *(name.split(".")[0] for name in field_names())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--resume.allow: there is no field {name!r}{rules.nearest(name, sorted(known))}" for name in unknown
        )
    return names


def _with_paths(argv: Sequence[str]) -> list[str]:
    """The command line with recipes' names after `--config` replaced by their files."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--config":
            words.append(find_config(word))
        elif word.startswith("--config="):
            words.append(f"--config={find_config(word.removeprefix('--config='))}")
        else:
            words.append(word)
    return words


def make_parser() -> ArgumentParser:
    """The parser of `python -m train run`: a flag for each field of the config."""
    parser = ArgumentParser(
        prog="python -m train run",
        description="Train as one rank of a job. Whatever starts it, the ranks find each other.",
        epilog=EPILOG.format(recipes=" ".join(recipes())),
        formatter_class=_Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="a recipe's name or a YAML file; may be repeated")
    parser.add_class_arguments(Config, sub_configs=False)
    for action in parser._actions:
        if action.dest in Config.__dataclass_fields__:
            action.help = argparse.SUPPRESS  # jsonargparse's --strategy FILE and the like
    return parser


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines; one option a line and no wall of usage."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage("%(prog)s --config RECIPE|FILE [--section.field VALUE ...]", actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str:
        default = _defaults().get(action.dest)
        if default in (None, [], {}) or "default:" in (action.help or ""):
            return action.help or ""
        shown = json.dumps(default) if isinstance(default, bool | list | dict) else str(default)
        return f"{action.help} (default: {shown})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.dest.rsplit(".", 1)[-1].upper()


def _defaults() -> dict[str, Any]:
    return {key: value for key, value, _ in flatten(Config().as_dict())}


def config_of(values: dict[str, Any]) -> Config:
    """The config that a checkpoint holds as a dict. Raises UsageError where this Muster does not know all of it."""
    parser = make_parser()
    try:
        return build(parser, parser.parse_object(values))
    except (ArgumentError, TypeError, KeyError) as error:
        raise UsageError(f"its config is of another version of Muster: {error}") from None


def read_config(argv: Sequence[str], world_size: int = 1) -> Config:
    """The config that a command line names, typed but not yet checked for a world size.

    Raises UsageError with every unknown key, wrong type and missing file; and, where there is one, with what else
    is wrong for that world size.
    """
    parser = make_parser()
    try:
        return build(parser, parser.parse_args(_with_paths(argv)))
    except (ArgumentError, TypeError, UnicodeDecodeError) as error:
        found = list(diagnose(parser, argv, world_size))
        if not found and not isinstance(error, ArgumentError):
            raise
        raise UsageError(found or str(error)) from None


def checked_config(argv: Sequence[str], world_size: int) -> Config:
    """`read_config`, and every rule of `train/rules.py` for this world size. Raises UsageError."""
    config = read_config(argv, world_size)
    found = rules.problems(config, world_size)
    if found:
        raise UsageError([str(problem) for problem in found])
    return config


def launch_problems(argv: Sequence[str], world_size: int) -> list[str]:
    """What a launcher can tell of a config before any host does; whether data is there is the hosts' to say."""
    try:
        checked_config(split_launch_options(argv)[1], world_size)
    except UsageError as error:
        return [problem for problem in error.problems if not problem.startswith("data.paths")]
    return []
