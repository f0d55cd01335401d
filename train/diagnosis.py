"""Every problem of a command line that does not parse.

jsonargparse stops at its first error. So what was given, in files and on the command line, is taken apart and looked
at again, one field at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from train import rules
from train.config import Config, field_names
from train.recipes import find_config, recipes


def build(parser: ArgumentParser, namespace: Namespace) -> Config:
    """The config of a parsed namespace."""
    made = parser.instantiate(namespace)
    return Config(**{name: made[name] for name in Config.__dataclass_fields__})


def diagnose(parser: ArgumentParser, argv: Sequence[str], world_size: int) -> Iterator[str]:
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
        elif key in Config.__dataclass_fields__:
            bad.add(key)
            example = next(name for name in known if name.startswith(f"{key}."))
            yield f"{key}: is a section of fields, such as {example}, but is {value!r}{where}"
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
                shown = "empty" if value is None else repr(value)
                yield f"{key}: {_expected(key) or _plain(str(error))}, but is {shown}{where}"
    if bad:
        config = build(parser, parser.parse_object(good))
        alone = rules.out_of_range(config)
        yield from (
            str(problem)
            for problem in rules.problems(config, world_size)
            if (problem in alone and problem.field not in bad) or not _rests_on(problem, bad)
        )


def _expected(key: str) -> str | None:
    """What a field takes, in words."""
    section, _, name = key.partition(".")
    kind = get_type_hints(get_type_hints(Config)[section])[name]
    kinds = [kind for kind in get_args(kind) if kind is not NoneType] if isinstance(kind, UnionType) else [kind]
    if get_origin(kinds[0]) is Literal:
        return f"must be one of {', '.join(get_args(kinds[0]))}"
    return _KINDS.get(get_origin(kinds[0]) or kinds[0])


_KINDS: dict[Any, str] = {
    int: "must be a whole number",
    float: "must be a number",
    bool: "must be true or false",
    str: "must be a word",
    list: "must be a list, such as [a.txt]",
    tuple: "must be two numbers, such as [0.9, 0.95]",
    dict: "must be named values, such as {depth: 3}",
}


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
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            hint = f"; did you mean --config {word}?" if word in recipes() else ""
            yield "", f"{word!r} is not an option; fields are given as --section.field VALUE{hint}", ""
            continue
        key, equals, rest = word[2:].partition("=")
        value: Any = rest
        if not equals and key not in ("print_config", "help"):
            value = words.pop(0) if words and not words[0].startswith("--") else _MISSING
        if key.endswith("+"):  # jsonargparse's way to add to a list
            key = key[:-1]
            value = value if value is _MISSING or value.startswith("[") else [value]
        if key == "config" and isinstance(value, str):
            yield from _from_file(value)
        elif key not in ("print_config", "help"):
            yield key, value, ""


_MISSING = object()


def _from_file(name: str) -> Iterator[tuple[str, Any, str]]:
    path = Path(find_config(name))
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
        yield "", f"--config: {name!r} is not valid YAML: {_yaml_words(error)}", ""
        return
    if not isinstance(content, dict | None):
        yield "", f"--config: {name!r} must hold sections of fields, not {type(content).__name__}", ""
        return
    yield from flatten(content or {}, "", str(name))


def _yaml_words(error: yaml.YAMLError) -> str:
    """Where and what, without PyYAML's drawing."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {' '.join(filter(None, (error.context, error.problem)))}"
    return " ".join(str(error).split())


def flatten(tree: dict[Any, Any], prefix: str = "", origin: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, origin) for each leaf field, or wrong name, in nested sections."""
    leaves = set(field_names())
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in leaves:
            yield from flatten(value, f"{dotted}.", origin)
        else:
            yield dotted, value, origin
