"""Which values of the config are possible, alone and together: all problems at once, each with its fix.

Free of torch, like `train/config.py`.
"""

from __future__ import annotations

import difflib
import glob
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.config import Config, field_names

BUILT_IN_MODELS = ("gpt", "mlp", "linear")
BUILT_IN_DATA = ("text", "tokens", "digits", "regression", "classification")
TOKEN_DATA = ("text", "tokens")
PRESETS = {  # layers, heads, width
    "tiny": (2, 2, 96),
    "small": (6, 4, 256),
    "10M": (8, 8, 320),
    "124M": (12, 12, 768),
}
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Problem(NamedTuple):
    """One thing wrong: the field that is to blame, and what to tell its owner."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def problems(config: Config, world_size: int) -> list[Problem]:
    """Everything that makes this config impossible for `world_size` ranks."""
    empty = list(_empty(config))
    if empty:
        return empty
    checks = (_ranges, _batch, _strategy, _model, _data, _runtime)
    return [problem for check in checks for problem in check(config, world_size)]


def out_of_range(config: Config) -> list[Problem]:
    """The problems that rest on one field alone."""
    return [*_empty(config), *_ranges(config, 1)]


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """`; did you mean …?` with the known word most like this one, or nothing."""
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in known}
    leaf = word.rsplit(".", 1)[-1]
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or [
        by_leaf[found] for found in difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    ]
    return f"; did you mean {match[0]}?" if match else ""


def _value(config: Config, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def _at_least(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v >= low), f"must be at least {low}"


def _above(low: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v > low), f"must be above {low}"


def _from_to(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: low <= v <= high), f"must be from {low} to {high}"


def _below_one() -> tuple[Callable[[Any], bool], str]:
    return (lambda v: 0 <= v < 1), "must be at least 0 and below 1"


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "strategy.bucket_mb": _above(0),
    "strategy.powersgd_rank": _at_least(1),
    "model.layers": _at_least(1),
    "model.heads": _at_least(1),
    "model.width": _at_least(1),
    "model.dropout": _below_one(),
    "data.block_size": _at_least(2),
    "data.vocab_size": _at_least(2),
    "data.val_fraction": ((lambda v: 0 < v < 1), "must be above 0 and below 1"),
    "data.size": _at_least(20),
    "data.workers": _at_least(0),
    "batch.global_size": _at_least(1),
    "batch.micro_size": _at_least(1),
    "batch.accumulation": _at_least(1),
    "optim.lr": _above(0),
    "optim.betas": ((lambda v: all(0 <= beta < 1 for beta in v)), "each must be at least 0 and below 1"),
    "optim.momentum": _below_one(),
    "optim.weight_decay": _at_least(0),
    "optim.clip_norm": _at_least(0),
    "optim.warmup_steps": _at_least(0),
    "optim.min_lr_ratio": _from_to(0, 1),
    "precision.initial_scale": _above(0),
    "precision.growth_interval": _at_least(1),
    "train.steps": _at_least(1),
    "train.epochs": _at_least(1),
    "train.seed": _from_to(0, 2**31 - 1),
    "train.threads": _at_least(1),
    "train.log_every": _at_least(1),
    "train.eval_every": _at_least(0),
    "train.save_every": _at_least(0),
    "train.keep_checkpoints": _at_least(1),
    "train.keep_every": _at_least(0),
    "train.check_replicas_every": _at_least(0),
    "train.sample_tokens": _at_least(0),
    "runtime.join_timeout_s": _above(0),
    "runtime.start_timeout_s": _above(0),
    "runtime.first_step_timeout_s": _above(0),
    "runtime.step_timeout_s": _above(0),
    "runtime.eval_timeout_s": _above(0),
    "runtime.save_timeout_s": _above(0),
}


def _empty(config: Config) -> Iterator[Problem]:
    for name in field_names():
        default = _value(_DEFAULTS, name)
        if default is not None and _value(config, name) is None:
            yield Problem(name, f"needs a value; leave it out for the default, {default}")


_DEFAULTS = Config()


def _ranges(config: Config, world_size: int) -> Iterator[Problem]:
    for name, (holds, words) in _RANGES.items():
        value = _value(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(name, f"must be a finite number, but is {value}")
        elif value is not None and not holds(value):
            yield Problem(name, f"{words}, but is {value}")


def _batch(config: Config, world_size: int) -> Iterator[Problem]:
    size, micro, windows = config.batch.global_size, config.batch.micro_size, config.batch.accumulation
    if size < 1 or (micro or 1) < 1 or (windows or 1) < 1:
        return  # said by the ranges
    if size < world_size:
        yield Problem(
            "batch.global_size",
            f"{size} samples a step cannot feed {world_size} ranks; use at least {world_size}, or at most {size} ranks",
        )
    elif windows is not None and size % (world_size * windows):
        unit = world_size * windows
        fits = [n for n in range(1, size // world_size + 1) if size % (world_size * n) == 0]
        sizes = [n for n in (size // unit * unit, (size // unit + 1) * unit) if n]
        also = f", or accumulation {_some(fits)}" if fits else ""
        yield Problem(
            "batch.accumulation",
            f"global_size {size} is not a multiple of world size {world_size} x accumulation {windows}; "
            f"what works: global_size {_some(sizes)}{also}",
        )
    elif windows is not None and micro is not None and size // (world_size * windows) > micro:
        need = -(-size // (world_size * micro))
        yield Problem(
            "batch.micro_size",
            f"global_size {size} / ({world_size} ranks x accumulation {windows}) = "
            f"{size // (world_size * windows)} samples, more than micro_size {micro}; "
            f"what works: micro_size {size // (world_size * windows)}, or accumulation {need} or more, "
            "or leave one of them out",
        )


def _some(values: list[int]) -> str:
    shown = [str(value) for value in values[-6:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _strategy(config: Config, world_size: int) -> Iterator[Problem]:
    strategy = config.strategy
    if strategy.name in ("baseline", "dp") and world_size > 1:
        yield Problem(
            "strategy.name",
            f"{strategy.name} is one process, but {world_size} ranks were started; "
            "use ddp or manual, or start one process",
        )
    if strategy.comm_hook != "none" and strategy.name != "ddp":
        yield Problem("strategy.comm_hook", f"{strategy.comm_hook} works with ddp only, not with {strategy.name}")
    if strategy.comm_hook != "none" and config.precision.name == "fp64":
        yield Problem("strategy.comm_hook", f"{strategy.comm_hook} would round the gradients of fp64; use none")
    largest_share = -(-config.batch.global_size // world_size)
    parts = config.batch.accumulation or -(-largest_share // max(1, config.batch.micro_size or largest_share))
    if strategy.static_graph and strategy.name == "ddp" and parts > 1:
        yield Problem(
            "strategy.static_graph",
            f"cannot hold gradients back for a step of {parts} micro-batches (torch fails inside): leave it false, "
            "or let a rank's share be one micro-batch",
        )
    if strategy.static_graph and strategy.find_unused_parameters:
        yield Problem("strategy.static_graph", "excludes find_unused_parameters: a static graph finds them by itself")


def _model(config: Config, world_size: int) -> Iterator[Problem]:
    model, data = config.model, config.data
    yield from _named("model.name", model.name, BUILT_IN_MODELS)
    if model.loss is not None and not IMPORT_PATH.fullmatch(model.loss):
        yield Problem("model.loss", f"{model.loss!r} is not of the form module:function")
    if model.name in BUILT_IN_MODELS and data.name in BUILT_IN_DATA:
        wants_tokens, has_tokens = model.name == "gpt", data.name in TOKEN_DATA
        if wants_tokens != has_tokens:
            fits = ", ".join(TOKEN_DATA if wants_tokens else BUILT_IN_DATA[2:])
            yield Problem("data.name", f"{model.name} cannot read {data.name}; what works: {fits}")
    if model.name == "gpt" and min(model.layers or 1, model.heads or 1, model.width or 1) > 0:
        _, heads, width = PRESETS[model.preset]
        heads, width = model.heads or heads, model.width or width
        if width % (2 * heads):
            possible = [n for n in range(1, width // 2 + 1) if width % (2 * n) == 0]
            below, above = [n for n in possible if n <= heads][-3:], [n for n in possible if n > heads][:2]
            works = f"heads {_some(below + above)}" if possible else "an even width"
            yield Problem(
                "model.heads",
                f"width {width} / heads {heads} must be a whole, even number (rotary positions turn pairs); "
                f"what works: {works}",
            )
    if model.checkpoint_activations and model.name in ("mlp", "linear"):
        yield Problem("model.checkpoint_activations", f"{model.name} has no blocks to recompute; works with gpt")
    if model.args and model.name in BUILT_IN_MODELS:
        takes = {"gpt": "takes layers, heads, width", "mlp": "takes width"}.get(model.name, "has no shape to choose")
        yield Problem("model.args", f"are for your own module:function; {model.name} {takes}")
    if model.name in ("mlp", "linear") and IMPORT_PATH.fullmatch(data.name):
        yield Problem(
            "model.name", f"{model.name} cannot know the shape of {data.name}; bring a model too, as module:function"
        )


def _data(config: Config, world_size: int) -> Iterator[Problem]:
    data = config.data
    yield from _named("data.name", data.name, BUILT_IN_DATA)
    if data.args and data.name in BUILT_IN_DATA:
        yield Problem("data.args", f"are for your own module:function; {data.name} does not take them")
    if data.paths and data.name not in TOKEN_DATA:
        yield Problem("data.paths", f"are for text and tokens; {data.name} does not read files")
    if data.name == "tokens" and len(data.path_list) != 2:
        yield Problem(
            "data.paths",
            f"tokens needs two files, for training and validation: [train.bin, val.bin]; {len(data.path_list)} given",
        )
    for path in data.path_list if data.name in TOKEN_DATA else ():
        if data.name == "tokens" and Path(path).exists() and not Path(path).is_file():
            yield Problem("data.paths", f"{path} is a folder; tokens needs the two files themselves")
        elif data.name == "tokens" and not Path(path).exists():
            yield Problem("data.paths", f"no such file: {path} (tokens takes two files, no globs)")
        elif not (Path(path).exists() or glob.glob(path, recursive=True)):
            yield Problem("data.paths", f"no such file or folder, and no glob that matches: {path}")


def _named(field: str, name: str, built_in: tuple[str, ...]) -> Iterator[Problem]:
    if name not in built_in and not IMPORT_PATH.fullmatch(name):
        choices = ", ".join(built_in)
        yield Problem(field, f"{name!r} is neither one of {choices} nor module:function{nearest(name, built_in)}")


def _runtime(config: Config, world_size: int) -> Iterator[Problem]:
    runtime = config.runtime
    if runtime.device == "cpu" and runtime.backend == "nccl":
        yield Problem("runtime.backend", "nccl needs runtime.device cuda; on the cpu use gloo")
