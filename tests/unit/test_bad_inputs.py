"""What Muster says to bad input: each case ends with exit code 2 and a message that names the culprit.

The messages stand in golden/bad_inputs.txt, to be read as a user would; `python -m tests.unit.test_bad_inputs`
writes that file anew.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import io
import logging
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import pytest
import torch

from train.cli import main
from train.options import make_parser
from train.run_folder import RunFolder, open_run

GOLDEN = Path(__file__).parent / "golden" / "bad_inputs.txt"
RECORD = "python -m tests.unit.test_bad_inputs"
HEADING = f"What Muster says to bad input. Checked by tests/unit/test_bad_inputs.py; `{RECORD}` writes it anew.\n"

SMALL = "--model.name mlp --data.name regression --train.steps 1 --train.tensorboard false"
OWN = "--model.name own:model --data.name own:data --train.steps 1 --train.tensorboard false"
OWN_DATA = "--data.name own:data --train.steps 1 --train.tensorboard false"
PARSER = functools.cache(make_parser)  # making it reads all docstrings again, which is half of a case's time


def torchrun(rank: int, world_size: int, **more: str) -> dict[str, str]:
    """What torchrun sets for one rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "n1", "MASTER_PORT": "29500", **more}


@dataclass(frozen=True)
class Case:
    """A bad command line after `python -m train run`, with the files and variables around it."""

    title: str
    command: str
    names: tuple[str, ...]
    """Words without which the message would not help."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    """A good command line that is run first, in the same folder."""


CONFIG = [
    Case("an unknown field", "--train.steps 4 --optim.lrr 0.1", ("optim.lrr", "did you mean optim.lr?")),
    Case(
        "an unknown field in a file",
        "--config job.yaml",
        ("optim.momentun", "job.yaml", "did you mean optim.momentum?"),
        {"job.yaml": "optim: {momentun: 0.9}\ntrain: {steps: 4}\n"},
    ),
    Case(
        "an unknown section in a file",
        "--config job.yaml",
        ("optimizer.lr", "job.yaml", "did you mean optim.lr?"),
        {"job.yaml": "optimizer: {lr: 0.1}\ntrain: {steps: 4}\n"},
    ),
    Case(
        "several problems, of which some keep the config from being read at all",
        "--strategy.name dpp --optim.lrr 0.1 --optim.momentum 3 --batch.accumulation few --data.name dijits",
        ("strategy.name", "ddp", "optim.lrr", "optim.momentum", "batch.accumulation", "did you mean digits?"),
    ),
    Case(
        "several problems in a config that can be read",
        "--train.steps 0 --optim.lr -1 --model.name gtp --data.block_size 1",
        ("train.steps", "optim.lr", "-1", "did you mean gpt?", "data.block_size"),
    ),
    Case(
        "problems in a file and on the command line",
        "--config job.yaml --train.stepz 3 --train.log_every 0",
        ("optim.lr", "fast", "job.yaml", "train.stepz", "did you mean train.steps?", "train.log_every"),
        {"job.yaml": "optim: {lr: fast}\n"},
    ),
    Case(
        "a misspelt field, and more ranks than the strategy has",
        "--train.steps 4 --optim.lrr 0.1",
        ("optim.lrr", "strategy.name", "2 ranks"),
        env=torchrun(0, 2),
    ),
    Case("a word for a whole number", "--train.steps many", ("train.steps", "whole number", "'many'")),
    Case("a fraction for a whole number", "--train.steps 1.5", ("train.steps", "whole number", "1.5")),
    Case("a word for a number", "--train.steps 4 --optim.lr fast", ("optim.lr", "number", "'fast'")),
    Case(
        "a word for yes or no",
        "--train.steps 4 --train.tensorboard maybe",
        ("train.tensorboard", "true or false", "'maybe'"),
    ),
    Case(
        "named values for a list in a file",
        "--config job.yaml",
        ("data.paths", "list", "[a.txt]", "job.yaml"),
        {"job.yaml": "data:\n  paths: {a: 3}\n"},
    ),
    Case("one number for two", "--train.steps 4 --optim.betas 0.9", ("optim.betas", "two numbers", "0.9")),
    Case("a number for named arguments", "--train.steps 4 --model.args 3", ("model.args", "3")),
    Case(
        "a list for a number in a file",
        "--config job.yaml",
        ("train.steps", "whole number", "[4]", "job.yaml"),
        {"job.yaml": "train:\n  steps: [4]\n"},
    ),
    Case(
        "a field left empty in a file",
        "--config job.yaml --train.steps 4",
        ("optim.lr", "needs a value", "default, 0.00"),
        {"job.yaml": "optim:\n  lr:\n"},
    ),
    Case(
        "values out of range",
        "--train.steps 4 --optim.lr 0 --model.dropout 1 --data.val_fraction 0 --train.seed -1 --optim.betas [0.9,1]",
        ("optim.lr", "model.dropout", "below 1", "data.val_fraction", "train.seed", "optim.betas"),
    ),
    Case(
        "numbers that are none",
        "--train.steps 4 --optim.lr .inf --optim.clip_norm .nan --runtime.step_timeout_s .inf",
        ("optim.lr", "inf", "optim.clip_norm", "nan", "runtime.step_timeout_s"),
    ),
    Case("a choice that there is not", "--train.steps 4 --optim.name adam", ("optim.name", "adamw", "sgd", "'adam'")),
    Case("no value at the end", "--train.steps 4 --optim.lr", ("optim.lr", "a value must follow")),
    Case("no value before the next option", "--optim.lr --train.steps 4", ("optim.lr", "a value must follow")),
    Case("no value after --config", "--config --train.steps 4", ("config", "a value must follow")),
    Case("a stray word", "ddp --train.steps 4", ("'ddp'", "--config ddp")),
    Case("a misspelt recipe", "--config acumulation", ("'acumulation'", "baseline", "did you mean accumulation?")),
    Case("a config file that is not there", "--config jobs/big.yaml", ("'jobs/big.yaml'", "no file", "baseline")),
    Case("a folder as config", "--config jobs", ("--config", "'jobs'", "directory"), {"jobs/big.yaml": ""}),
    Case("a binary file as config", "--config job.pt", ("--config", "'job.pt'"), {"job.pt": b"PK\x03\x04\x80\xff\x00"}),
    Case(
        "broken YAML",
        "--config job.yaml",
        ("--config", "'job.yaml'", "line 2"),
        {"job.yaml": "train: {steps: 4\n"},
    ),
    Case("a list as config", "--config job.yaml", ("'job.yaml'", "sections", "list"), {"job.yaml": "- steps\n- 4\n"}),
    Case(
        "a number for a section",
        "--config job.yaml",
        ("train", "section", "job.yaml", "train.steps"),
        {"job.yaml": "train: 4\n"},
    ),
    Case("a section on the command line", "--train 4", ("train", "section", "train.steps")),
    Case(
        "accumulation that does not divide the batch",
        "--train.steps 4 --batch.global_size 32 --batch.accumulation 5 --strategy.name ddp",
        ("batch.accumulation", "32", "3 x accumulation 5", "global_size 30 or 45"),
        env=torchrun(0, 3),
    ),
    Case(
        "fewer samples than ranks",
        "--train.steps 4 --batch.global_size 2 --strategy.name ddp",
        ("batch.global_size", "2 samples", "4 ranks"),
        env=torchrun(0, 4),
    ),
    Case(
        "micro-batches larger than allowed",
        "--train.steps 4 --batch.global_size 64 --batch.accumulation 2 --batch.micro_size 8 --strategy.name manual",
        ("batch.micro_size", "micro_size 16", "accumulation 4"),
        env=torchrun(0, 2),
    ),
    Case("baseline with two ranks", "--train.steps 4", ("baseline", "2 ranks", "ddp or manual"), env=torchrun(0, 2)),
    Case(
        "dp with two ranks",
        "--train.steps 4 --strategy.name dp",
        ("strategy.name", "dp", "2 ranks", "ddp or manual"),
        env=torchrun(0, 2),
    ),
    Case(
        "a hook without ddp",
        "--train.steps 4 --strategy.comm_hook fp16",
        ("strategy.comm_hook", "ddp only", "baseline"),
    ),
    Case(
        "a hook that rounds float64",
        "--train.steps 4 --strategy.name ddp --strategy.comm_hook bf16 --precision.name fp64",
        ("strategy.comm_hook", "fp64", "none"),
    ),
    Case(
        "a static graph whose unused parameters are looked for",
        "--train.steps 4 --strategy.name ddp --strategy.static_graph true --strategy.find_unused_parameters true",
        ("strategy.static_graph", "find_unused_parameters"),
    ),
    Case("gpt on digits", "--train.steps 4 --data.name digits", ("gpt", "digits", "text, tokens")),
    Case("mlp on text", "--train.steps 4 --model.name mlp", ("mlp", "text", "digits, regression, classification")),
    Case(
        "heads that do not divide the width",
        "--train.steps 4 --model.width 128 --model.heads 3",
        ("model.heads", "width 128", "heads 3", "what works"),
    ),
    Case(
        "heads that do not divide the preset's width",
        "--train.steps 4 --model.preset small --model.heads 5",
        ("model.heads", "width", "heads 5", "what works"),
    ),
    Case("nccl on the cpu", "--train.steps 4 --runtime.device cpu --runtime.backend nccl", ("nccl", "cuda", "gloo")),
    Case(
        "arguments for a built-in model",
        f"{SMALL} --model.args.depth 3",
        ("model.args", "module:function", "mlp takes width"),
    ),
    Case("arguments for built-in data", f"{SMALL} --data.args.n 3", ("data.args", "module:function", "regression")),
    Case("files for data that reads none", f"{SMALL} --data.paths [a.txt]", ("data.paths", "regression")),
    Case(
        "names that are not module:function",
        "--train.steps 4 --model.name my-model:build --data.name src/own.py:data --model.loss loss",
        ("model.name", "'my-model:build'", "data.name", "'src/own.py:data'", "model.loss", "'loss'", "module:function"),
    ),
    Case(
        "recomputing what has no blocks",
        f"{SMALL} --model.checkpoint_activations true",
        ("model.checkpoint_activations", "mlp", "gpt"),
    ),
    Case(
        "a built-in model on data of one's own",
        f"{OWN_DATA} --model.name mlp",
        ("model.name", "mlp", "module:function"),
        {"own.py": "def data():\n    return [((1.0,), 2.0)], [((1.0,), 2.0)]\n"},
    ),
]

ENVIRONMENT = [
    Case("torchrun's variables half set", SMALL, ("RANK=1", "WORLD_SIZE", "MASTER_ADDR", "unset"), env={"RANK": "1"}),
    Case(
        "a variable of torchrun's set to nothing",
        SMALL,
        ("WORLD_SIZE=2 without RANK", "unset WORLD_SIZE"),
        env={"RANK": "", "WORLD_SIZE": "2"},
    ),
    Case("LOCAL_RANK alone", SMALL, ("LOCAL_RANK=0", "RANK, WORLD_SIZE", "unset LOCAL_RANK"), env={"LOCAL_RANK": "0"}),
    Case(
        "variables that are not numbers",
        SMALL,
        ("RANK='one'", "WORLD_SIZE='two'", "MASTER_PORT='http'", "whole number"),
        env=torchrun(0, 2, RANK="one", WORLD_SIZE="two", MASTER_PORT="http"),
    ),
    Case(
        "a rank beyond the world size",
        f"{SMALL} --strategy.name ddp",
        ("rank 2", "torchrun", "from 0 to 1"),
        env=torchrun(2, 2),
    ),
    Case("a world of nobody", SMALL, ("world size 0", "at least 1"), env=torchrun(0, 0)),
    Case(
        "a port beyond the last",
        f"{SMALL} --strategy.name ddp",
        ("port 70000", "65535"),
        env=torchrun(0, 2, MASTER_PORT="70000"),
    ),
    Case(
        "flags that contradict the environment",
        f"{SMALL} --rank 1 --world-size 3 --master-addr n1 --master-port 29500",
        ("--rank 1", "RANK=0", "--world-size 3", "WORLD_SIZE=2"),
        env=torchrun(0, 2),
    ),
    Case("flags that are not all there", f"{SMALL} --rank 1", ("--rank 1", "--world-size", "--master-addr")),
    Case("a flag that is not a number", f"{SMALL} --rank one", ("--rank", "whole number", "'one'")),
    Case("--local-rank alone", f"{SMALL} --local-rank 1", ("--local-rank 1", "--rank", "--world-size")),
    Case(
        "--local-rank that contradicts the environment",
        f"{SMALL} --local-rank 1",
        ("--local-rank 1", "LOCAL_RANK=0"),
        env=torchrun(0, 1, LOCAL_RANK="0"),
    ),
    Case(
        "port 0 as a flag",
        f"{SMALL} --strategy.name ddp --rank 0 --world-size 2 --master-addr 127.0.0.1 --master-port 0 "
        "--runtime.join_timeout_s 0.1",
        ("port 0", "from 1 to 65535"),
    ),
    Case(
        "Slurm's variables half set",
        SMALL,
        ("slurm", "SLURM_PROCID=1", "SLURM_LOCALID", "SLURM_JOB_NODELIST"),
        env={"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
    ),
    Case(
        "a host list that cannot be read",
        SMALL,
        ("'n[1-'", "host list"),
        env={
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NODELIST": "n[1-",
        },
    ),
    Case(
        "mpirun over several hosts without an address",
        SMALL,
        ("mpirun", "4 ranks", "-x MASTER_ADDR"),
        env={
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ),
    Case(
        "an address that every host has",
        f"{SMALL} --strategy.name ddp",
        ("127.0.0.1", "more than one host"),
        env=torchrun(2, 4, MASTER_ADDR="127.0.0.1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
    ),
    Case(
        "a file that only another host has",
        "--config job.yaml",
        ("rank 2", "'job.yaml'", "no file"),
        env=torchrun(2, 4, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
    ),
    Case(
        "environment and config both",
        "--train.steps 4 --optim.lrr 0.1",
        ("RANK=1", "WORLD_SIZE", "optim.lrr", "did you mean optim.lr?"),
        env={"RANK": "1"},
    ),
    Case(
        "a port that another program has",
        f"{SMALL} --strategy.name ddp",
        ("port <PORT>", "in use", "<HOST>", "--master-port"),
        env=torchrun(0, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT="<PORT>"),
    ),
    Case(
        "an interface that is not there",
        f"{SMALL} --strategy.name ddp --runtime.interface eth77 --runtime.join_timeout_s 0.1",
        ("runtime.interface", "'eth77'", "it has"),
        env=torchrun(0, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT="29477"),
    ),
    Case(
        "cuda without a GPU",
        f"{SMALL} --runtime.device cuda",
        ("runtime.device", "no GPU", "<TORCH>", "CUDA_VISIBLE_DEVICES", "cpu"),
        env={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Case("nccl without a GPU", f"{SMALL} --runtime.backend nccl", ("runtime.backend", "nccl", "gloo", "no GPU")),
    Case("a run's name with a path in it", f"{SMALL} --run-id ../mine", ("--run-id", "'../mine'", "letters")),
    Case(
        "a run's name from the environment", SMALL, ("MUSTER_RUN_ID", "'a b'", "letters"), env={"MUSTER_RUN_ID": "a b"}
    ),
    Case("no value after --run-id", f"{SMALL} --run-id", ("--run-id", "a value must follow")),
]

DATA = [
    Case("a file that is not there", "--train.steps 4 --data.paths [books/a.txt]", ("data.paths", "books/a.txt")),
    Case(
        "a glob that matches nothing",
        "--train.steps 4 --data.paths '[books/*.txt]'",
        ("data.paths", "glob", "books/*.txt"),
        {"books/a.md": "A"},
    ),
    Case("empty text", "--train.steps 4 --data.paths [a.txt]", ("data.paths", "a.txt", "no text"), {"a.txt": ""}),
    Case("too little text", "--train.steps 4 --data.paths [a.txt]", ("data.paths", "too little"), {"a.txt": "abc"}),
    Case(
        "a file as folder for the cache",
        "--train.steps 4 --data.paths [a.txt] --data.cache_dir a.txt",
        ("data.cache_dir", "a.txt"),
        {"a.txt": "text " * 9},
    ),
    Case(
        "one token file for two",
        "--train.steps 4 --data.name tokens --data.paths [train.bin]",
        ("data.paths", "training and validation", "1 given"),
        {"train.bin": b"\1\0" * 9},
    ),
    Case(
        "a token file of an odd size",
        "--train.steps 4 --data.name tokens --data.paths [train.bin,val.bin]",
        ("data.paths", "val.bin", "19 bytes", "uint16"),
        {"train.bin": b"\1\0" * 9, "val.bin": b"\1\0" * 9 + b"\1"},
    ),
    Case(
        "a folder of token files",
        "--train.steps 4 --data.name tokens --data.paths [tokens,tokens/val.bin]",
        ("data.paths", "tokens", "folder"),
        {"tokens/val.bin": b"\1\0" * 9},
    ),
    Case(
        "globs for token files",
        "--train.steps 4 --data.name tokens --data.paths '[train*.bin,val*.bin]'",
        ("data.paths", "train*.bin", "val*.bin"),
        {"train1.bin": b"\1\0" * 9, "val1.bin": b"\1\0" * 9},
    ),
    Case(
        "a token beyond the vocabulary",
        "--train.steps 1 --data.name tokens --data.paths [train.bin,train.bin] --data.vocab_size 100 "
        "--data.block_size 8 --model.width 8 --model.heads 1 --train.tensorboard false",
        ("data.vocab_size", "token 513", "100"),
        {"train.bin": b"\1\2" * 9},
    ),
    Case("a module that is not there", OWN, ("data.name", "'own'", "own:data", "PYTHONPATH")),
    Case(
        "a module named as a file",
        f"{SMALL} --model.loss own.py:loss",
        ("model.loss", "own.py:loss", "own:loss"),
        {"own.py": "def loss(output, target):\n    return (output - target).square()\n"},
    ),
    Case(
        "a function that is not there",
        f"{SMALL} --model.loss own:huber",
        ("model.loss", "own", "'huber'", "did you mean huber_loss?"),
        {"own.py": "def huber_loss(output, target):\n    return (output - target).abs()\n"},
    ),
    Case(
        "a module that fails",
        f"{SMALL} --model.loss own:loss",
        ("model.loss", "own", "ZeroDivisionError", "own.py", "line 2"),
        {"own.py": "def loss(output, target): ...\nSIZE = 1 / 0\n"},
    ),
    Case(
        "a module that needs another one",
        f"{SMALL} --model.loss timmy_loss:loss",
        ("model.loss", "timmy_loss", "No module named 'timmy'"),
        {"timmy_loss.py": "import timmy\n"},
    ),
    Case(
        "an iterable data set",
        OWN,
        ("data.name", "own:data", "Lines", "__len__", "__getitem__"),
        {
            "own.py": "from torch.utils.data import IterableDataset\n"
            "class Lines(IterableDataset):\n    def __iter__(self):\n        yield 1.0, 2.0\n"
            "def data():\n    return Lines(), Lines()\n"
        },
    ),
    Case(
        "one data set for two",
        OWN,
        ("data.name", "own:data", "must return (training set, validation set)", "TensorDataset"),
        {"own.py": "import torch\ndef data():\n    return torch.utils.data.TensorDataset(torch.ones(4, 2))\n"},
    ),
    Case(
        "samples that are not tuples",
        OWN,
        ("data.name", "own:data", "(input, …, target)", "a Tensor"),
        {"own.py": "import torch\ndef data():\n    return torch.ones(4, 2), torch.ones(4, 2)\n"},
    ),
    Case(
        "no samples",
        OWN,
        ("data.name", "own:data", "no training samples"),
        {"own.py": "def data():\n    return [], []\n"},
    ),
    Case(
        "an argument that the function does not take",
        f"{OWN} --data.args.count 3",
        ("data.args", "own:data", "'count'"),
        {"own.py": "def data(size=4):\n    return [], []\n"},
    ),
    Case(
        "an argument that the model's function misses",
        "--model.name own:model --data.name classification --train.steps 1 --train.tensorboard false",
        ("model.args", "own:model", "'depth'"),
        {"own.py": "def model(depth):\n    return None\n"},
    ),
    Case(
        "a model that is none",
        "--model.name own:model --data.name classification --train.steps 1 --train.tensorboard false",
        ("model.name", "own:model", "torch.nn.Module", "a list"),
        {"own.py": "def model():\n    return []\n"},
    ),
    Case(
        "a loss of one number",
        f"{SMALL} --model.loss own:loss",
        ("model.loss", "one number", "reduction='none'", "(sum, count)"),
        {"own.py": "def loss(output, target):\n    return (output - target).square().mean()\n"},
    ),
    Case(
        "a function with an emoji's name",
        f"{SMALL} --model.loss own:key",
        ("model.loss", "own:key: importing own failed"),
        {"own.py": "1 / 0\n"},
    ),
    Case("a file in the way of the run folders", f"{SMALL} --runs-dir a/b", ("--runs-dir", "a/b"), {"a": ""}),
    Case("a file in the way of the logs", f"{SMALL} --run-id r", ("runs/r", "logs"), {"runs/r/logs": ""}),
    Case(
        "a checkpoint that is none",
        f"{SMALL} --resume books",
        ("--resume books", "neither a checkpoint nor a run folder"),
        {"books/a.txt": "A"},
    ),
    Case("a checkpoint that is not there", f"{SMALL} --resume atuo", ("--resume atuo", "auto", "none")),
    Case(
        "a checkpoint that is damaged",
        f"{SMALL} --resume step-1",
        ("--resume step-1", "step-1", "not a whole checkpoint"),
        {"step-1/manifest.json": "{}"},
    ),
    Case(
        "a run's name with another model",
        f"{SMALL} --run-id r --model.width 8",
        ("run r", "model.width", "None", "8", "--resume none"),
        before=f"{SMALL} --run-id r",
    ),
    Case(
        "a checkpoint of another model",
        f"{SMALL} --resume runs/r --run-id s --model.width 8",
        ("--resume runs/r", "model.width", "None", "8"),
        before=f"{SMALL} --run-id r",
    ),
]

CASES = [*CONFIG, *ENVIRONMENT, *DATA]


class Outcome(NamedTuple):
    """How a case ended: code, and what it said without progress."""

    code: int
    text: str


@functools.cache
def outcome_of(index: int) -> Outcome:
    """Run a case in a folder of its own."""
    case = CASES[index]
    with tempfile.TemporaryDirectory() as name, socket.socket() as taken:
        folder = Path(name).resolve()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for path, content in case.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        if case.before:
            before = _run(case.before, folder, {})
            assert before.code == 0, f"{case.title}: the run before it failed:\n{before.text}"
        outcome = _run(case.command, folder, {name: value.replace("<PORT>", port) for name, value in case.env.items()})
        text = re.sub(rf"\b{port}\b", "<PORT>", outcome.text.replace(str(folder), "<TMP>"))
    text = re.sub(rf"(?<![\w.]){re.escape(socket.gethostname())}(?![\w.-])", "<HOST>", text)
    text = re.sub(r"(?<='eth77'; it has ).*", "<INTERFACES>", text.replace(torch.__version__, "<TORCH>"))
    text = re.sub(r"(?<=regression-)\d{8}-\d{6}-\w{4}", "<TIME>", text)
    return Outcome(outcome.code, "".join(line for line in text.splitlines(keepends=True) if not _is_progress(line)))


def _run(command: str, folder: Path, env: Mapping[str, str]) -> Outcome:
    """`python -m train run COMMAND` in this process, in that folder, with nothing in the environment but `env`."""
    said = io.StringIO()
    with _as_a_process_of_its_own(folder, env), redirect_stdout(said), redirect_stderr(said):
        try:
            code = main(["run", *shlex.split(command)])
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
        except Exception:  # what Python itself would do with it
            code = 1
            said.write(traceback.format_exc())
    return Outcome(code, said.getvalue())


@contextmanager
def _as_a_process_of_its_own(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Undo what a rank does to its process."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    threads = torch.get_num_threads()
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), **env}
    log = logging.getLogger("train")
    kept = log.handlers[:], log.level, log.propagate
    log.handlers = []
    importlib.invalidate_caches()
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(patch.dict(os.environ, clean, clear=True))
        stack.enter_context(patch.object(sys, "path", sys.path[:]))
        stack.enter_context(patch("os._exit", _leave))

        def open_and_release(*args: Any) -> RunFolder:
            opened = open_run(*args)
            stack.callback(opened._lock.close)  # as the end of the process would
            return opened

        stack.enter_context(patch("train.job.open_run", open_and_release))
        stack.enter_context(patch("train.options.make_parser", PARSER))
        stack.enter_context(patch("torch.cuda.device_count", return_value=0))  # the same words on hosts with GPUs
        try:
            yield
        finally:
            for handler in log.handlers:
                handler.close()
            log.handlers, log.level, log.propagate = kept
            torch.set_num_threads(threads)
            for number, handle in signals.items():
                signal.signal(number, handle)
            for name, module in sys.modules.copy().items():
                if str(getattr(module, "__file__", None)).startswith(str(folder)):
                    del sys.modules[name]


def _leave(code: int) -> NoReturn:
    raise SystemExit(code)


def _is_progress(line: str) -> bool:
    return re.match(r"muster: |run folder |1 rank on |step \d", line) is not None


def _shown(case: Case, outcome: Outcome) -> str:
    """A case as it stands in the golden file."""
    lines = [f"== {case.title}"]
    for path, content in case.files.items():
        text = content if isinstance(content, str) else repr(content)
        lines += [f"   {path}:", *(f"   | {line}" for line in text.splitlines())]
    lines += [f"$ python -m train run {case.before}"] * bool(case.before)
    env = "".join(f"{name}={shlex.quote(value) if value != '<PORT>' else value} " for name, value in case.env.items())
    lines += [f"$ {env}python -m train run {case.command}", f"exit code {outcome.code}"]
    return "\n".join(lines) + "\n" + outcome.text


def all_shown() -> str:
    """The whole golden file as it should be now."""
    return "\n".join([HEADING, *(_shown(case, outcome_of(index)) for index, case in enumerate(CASES))])


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.title.replace(" ", "-") for case in CASES])
def test_bad_input_ends_with_code_2_and_names_the_culprit(index: int) -> None:
    outcome = outcome_of(index)
    assert "Traceback" not in outcome.text
    missing = [name for name in CASES[index].names if name not in outcome.text]
    assert not missing, f"{missing} not in:\n{outcome.text}"
    assert outcome.code == 2, outcome.text


def test_every_message_is_the_one_in_the_golden_file() -> None:
    expected, found = (text.splitlines() for text in (GOLDEN.read_text(encoding="utf-8"), all_shown()))
    diff = "\n".join(difflib.unified_diff(expected, found, str(GOLDEN), "now", lineterm=""))
    assert not diff, f"{diff}\n\nIf the new words are better: {RECORD}"


def test_titles_are_told_apart() -> None:
    assert len({case.title for case in CASES}) == len(CASES)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(all_shown(), encoding="utf-8")
    print(f"wrote {len(CASES)} cases to {GOLDEN}")
