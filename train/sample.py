"""`python -m train sample RUN --prompt …`: what a gpt that was trained on text writes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.errors import CheckpointError, UsageError
from train.seam import RUNS_DIR, Exit
from train.shelf import chosen, folder_of

_BYTES = 256


def main(argv: Sequence[str]) -> int:
    """Write to standard output; an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train sample",
        description="Let a gpt that was trained on text go on from a prompt. RUN may also be a .safetensors file that "
        "`python -m train checkpoints export` made.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run's name, its folder, or an exported file")
    parser.add_argument("--prompt", default="\n", help="what to go on from (a line break)")
    parser.add_argument("--tokens", type=int, default=400, help="how many bytes to write (400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="lower is safer, higher is wilder (0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same (0)")
    parser.add_argument("--step", type=int, help="that step's checkpoint (default: the newest whole one)")
    parser.add_argument("--runs-dir", default=os.environ.get(RUNS_DIR) or "runs", help="where run folders are (runs)")
    options = parser.parse_args(argv)
    try:
        if options.tokens < 1 or options.temperature <= 0 or not options.prompt:
            raise UsageError("--tokens, --temperature: must be above 0, and --prompt must not be empty")
        print(_write(options))
    except UsageError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return Exit.USAGE
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return Exit.PREFLIGHT
    return Exit.FINISHED


def _write(options: argparse.Namespace) -> str:
    import torch

    from train.data import Spec
    from train.models import GPT, build_model
    from train.options import config_of

    weights, values = _weights_and_config(options)
    config = config_of(values)
    if config.model.name != "gpt" or config.data.name != "text":
        raise UsageError(
            f"{options.run} is a {config.model.name} trained on {config.data.name}: only a gpt on text reads and "
            "writes bytes; load its weights with safetensors in a program of your own"
        )
    spec = Spec(kind="tokens", inputs=_BYTES, outputs=_BYTES, item="bytes")
    model = build_model(config.model, spec, config.data.block_size)
    assert isinstance(model, GPT)
    model.load_state_dict(weights)
    model.eval()
    torch.manual_seed(options.seed)
    prompt = torch.tensor(list(options.prompt.encode()))
    with torch.no_grad():
        written = model.generate(prompt, options.tokens, options.temperature)
    return bytes(written.tolist()).decode("utf-8", errors="replace")


def _weights_and_config(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    if Path(options.run).suffix != ".safetensors":
        state, _ = chosen(folder_of(options.run, options.runs_dir), options.step)
        return state["model"], state["config"]
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(options.run, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{options.run} is no file that `checkpoints export` made: {error}") from None
