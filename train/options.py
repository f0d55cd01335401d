"""Recipes, YAML files and the command line become one `Config`; or every problem at once.

jsonargparse does the parsing. It stops at its first error, so a failed parse is looked at again, one key
at a time, to tell all of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from train import rules
from train.config import Config, field_names
from train.errors import UsageError
from train.seam import RUN_ID, RUNS_DIR

set_parsing_settings(docstring_parse_attribute_docstrings=True)

EPILOG = """launch options (all ranks: the same config; each rank: its own identity):
  --rank, --world-size, --master-addr, --master-port, --local-rank
                        who this process is, where nothing sets the usual variables
  --run-id NAME         name of the run folder (default: the newest unfinished run of the same config, else new)
  --runs-dir FOLDER     where run folders are (default: runs)
  --resume auto|none|CHECKPOINT
                        auto: go on from the run's newest checkpoint; none: a new run

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


def recipes() -> dict[str, Path]:
    """The named configs that come with the package."""
    folder = resources.files("train") / "recipes"
    return {p.stem: p for p in sorted(Path(str(folder)).glob("*.yaml"))}


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
    ):
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, type=kind, default=None)
    try:
        found, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        option = (error.argument_name or "option").split("/")[0]
        raise UsageError(f"{option}: {error.message}") from None
    given = {name: value for name, value in vars(found).items() if value is not None}
    given.setdefault("run_id", os.environ.get(RUN_ID) or None)
    given.setdefault("runs_dir", os.environ.get(RUNS_DIR) or "runs")
    options = LaunchOptions(**given)
    if options.run_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", options.run_id):
        raise UsageError(f"--run-id: {options.run_id!r} must be letters, digits, '.', '_' or '-' (at most 128)")
    return options, rest


def _with_paths(argv: Sequence[str]) -> list[str]:
    """The command line with recipes' names after `--config` replaced by their files."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--config":
            words.append(_find_config(word))
        elif word.startswith("--config="):
            words.append(f"--config={_find_config(word.removeprefix('--config='))}")
        else:
            words.append(word)
    return words


def _find_config(name: str) -> str:
    """The path of a recipe or file. A recipe's name wins over a file without suffix of the same name."""
    return str(recipes().get(name, name))


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
    return parser


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines; one option a line and no wall of usage."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage("%(prog)s --config RECIPE|FILE [--section.field VALUE ...]", actions, groups, prefix)


def read_config(argv: Sequence[str]) -> Config:
    """The config that a command line names, typed but not yet checked for a world size.

    Raises UsageError with every unknown key, wrong type and missing file.
    """
    parser = make_parser()
    try:
        namespace = parser.parse_args(_with_paths(argv))
    except ArgumentError as error:
        raise UsageError(list(_diagnose(parser, argv)) or str(error)) from None
    return _build(parser, namespace)


def checked_config(argv: Sequence[str], world_size: int) -> Config:
    """`read_config`, and every rule of `train/rules.py` for this world size. Raises UsageError."""
    config = read_config(argv)
    found = rules.problems(config, world_size)
    if found:
        raise UsageError([str(problem) for problem in found])
    return config


def _build(parser: ArgumentParser, namespace: Namespace) -> Config:
    made = parser.instantiate(namespace)
    return Config(**{name: made[name] for name in Config.__dataclass_fields__})


def _diagnose(parser: ArgumentParser, argv: Sequence[str]) -> Iterator[str]:
    """Every problem of a command line that does not parse, and then those of the rest that does."""
    known = field_names()
    good: dict[str, Any] = {}
    bad: set[str] = set()
    for key, value, origin in _given(argv):
        where = f" ({origin})" if origin else ""
        if key == "":
            yield f"{value}{where}"
        elif value is _MISSING:
            bad.add(key)
            yield f"{key}: a value must follow --{key}"
        elif any(key.startswith(f"{name}.") for name in known):
            pass  # an entry of a dictionary, such as model.args.depth
        elif key not in known:
            bad.add(key)
            yield f"{key}: no such field{where}{rules.nearest(key, known)}"
        else:
            try:
                parser.parse_object({key: value})
                good[key] = value
            except ArgumentError as error:
                bad.add(key)
                yield f"{key}: {_plain(str(error))}{where}"
    if bad:
        config = _build(parser, parser.parse_object(good))
        yield from (str(problem) for problem in rules.problems(config, 1) if not _rests_on(problem, bad))


def _rests_on(problem: rules.Problem, bad: set[str]) -> bool:
    """Whether a rule failed only because a field with a bad value kept its default."""
    return any(
        key in f"{problem.field} {problem.message}" or key.split(".")[0] == problem.field.split(".")[0] for key in bad
    )


def _plain(message: str) -> str:
    """jsonargparse's words without its heading and type syntax."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = re.sub(r"<class '(\w+)'>", r"\1", " ".join(lines[1:] or lines))
    text = re.sub(
        r"Expected an? (?:typing\.)?(Literal)?\[?", lambda m: "must be one of [" if m[1] else "must be ", text
    )
    return text.replace(". Got value: ", ", but is ")


def _given(argv: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, file it is from) for all that was given; an empty key for what has none."""
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            yield "", f"{word!r} is not an option; fields are given as --section.field VALUE", ""
            continue
        key, equals, rest = word[2:].partition("=")
        value = rest if equals else next(words, _MISSING)
        if key == "config" and isinstance(value, str):
            yield from _from_file(value)
        elif key not in ("print_config", "help"):
            yield key, value, ""


_MISSING = object()


def _from_file(name: str) -> Iterator[tuple[str, Any, str]]:
    path = Path(_find_config(name))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        choices = ", ".join(recipes())
        yield (
            "",
            f"--config: no recipe and no file {name!r}; recipes: {choices}{rules.nearest(name, list(recipes()))}",
            "",
        )
        return
    except (OSError, UnicodeDecodeError) as error:
        yield "", f"--config: cannot read {name!r}: {error}", ""
        return
    except yaml.YAMLError as error:
        yield "", f"--config: {name!r} is not valid YAML: {' '.join(str(error).split())}", ""
        return
    if not isinstance(content, dict | None):
        yield "", f"--config: {name!r} must hold sections of fields, not {type(content).__name__}", ""
        return
    yield from _flatten(content or {}, "", str(name))


def _flatten(tree: dict[Any, Any], prefix: str, origin: str) -> Iterator[tuple[str, Any, str]]:
    leaves = set(field_names())
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in leaves:
            yield from _flatten(value, f"{dotted}.", origin)
        else:
            yield dotted, value, origin
