"""`python -m train verify`: the equivalence certificate, from the ranks that are there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.checks.ranked import CheckFailedError, Parser, refuse_to_go_on_if_stopped, refuse_unwritable, run_as_rank
from train.errors import ContactError
from train.progress import log
from train.rules import IMPORT_PATH

if TYPE_CHECKING:
    from train.checks.verify.certificate import Row
    from train.health import Health
    from train.runtime import Runtime

_EPILOG = """What it does: each rank trains a small job by itself in float64 and plain torch: one process, the whole
global batch at once. Then all ranks train the same job in every way that must be the same: as one process, as
DataParallel, as ddp and by hand; with micro-batches, with last windows that are not full, clipped, and stopped in the
middle and resumed from the checkpoint. Each rank begins with other weights, which a strategy has to make equal. After
each step gradients (as the optimizer sees them) and weights are compared with the right ones, and between ranks.
In float64 the largest |Δ| may be 1e-10. In bf16 the relative error of gradients, and of the way the weights have gone,
may be 2^-6 = 0.0156: eight roundings to the 8 bits of a bf16 number.
Where a way is not the same, it says why: what of each rank's own gradient is in the wrong one.

A strategy of your own is a class of the methods of train/strategies/base.py, in a module on your path:
  python -m train node --standalone --nproc-per-node 2 -- verify --strategy my_module:MyStrategy

Exit codes: 0 all the same · 2 usage · 5 not the same · 6 a strategy that waits for ever."""


def main(argv: Sequence[str]) -> int:
    """Verify as one rank; an exit code."""
    parser = Parser("verify", "Prove on these ranks that all ways to train are one.", _EPILOG)
    what = parser.add_argument_group("what")
    what.add_argument("--strategy", type=_own, metavar="MODULE:CLASS", help="only this strategy of your own")
    what.add_argument("--json", type=Path, metavar="FILE", help="the certificate, written by rank 0")
    return run_as_rank(parser, argv, check)


def check(runtime: Runtime, health: Health, options: argparse.Namespace) -> None:
    """All rows, as one rank. Raises CheckFailedError and others."""
    import torch

    from train.checks.verify import certificate

    refuse_unwritable(runtime, options.json)
    rows: list[Row] = []
    if runtime.world_size == 1:
        _say("one rank has nobody to differ from: start at least two")
    _say(certificate.heading())
    for row in _rows(runtime, health, options.strategy):
        rows.append(row)
        _say(certificate.line(row))
        if not row.is_same and runtime.rank == 0:
            log.warning(f"  {row.words}")
    facts = {"torch": torch.__version__, "ranks": runtime.world_size, "hosts": runtime.gather(runtime.host),
             "backend": runtime.backend, "device": runtime.device.type, "started_by": runtime.me.source,
             "strategy": options.strategy}  # fmt: skip
    if options.json is not None and runtime.rank == 0:
        try:
            options.json.write_text(json.dumps(certificate.as_json(facts, rows), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckFailedError(f"cannot write {options.json}: {error.strerror}") from None
    wrong = [row for row in rows if not row.is_same]
    if wrong:
        words = f"{len(wrong)} of {len(rows)} ways are not the same: {wrong[0].name}: {wrong[0].words}"
        raise CheckFailedError(words) if runtime.rank == wrong[0].worst_rank else ContactError(words)
    exact = max(max(row.gradients, row.weights) for row in rows if not row.is_relative)
    _say(f"all {len(rows)} ways are the same: in float64 to {exact:.1e} on {runtime.world_size} ranks")


def _rows(runtime: Runtime, health: Health, own: str | None) -> Iterator[Row]:
    from train.checks.verify import reference
    from train.checks.verify.cases import cases, job
    from train.checks.verify.certificate import compare
    from train.checks.verify.training import Rank, load_strategy, train
    from train.config import RuntimeConfig
    from train.data import open_data
    from train.identity import Identity
    from train.runtime import Runtime

    if own is not None:
        runtime.together(lambda: load_strategy(own))
    config = job(runtime.world_size)
    data = open_data(config.data, config.train.seed)
    me = Identity(local_rank=runtime.device.index)
    alone = Runtime(me, RuntimeConfig(device="cuda" if runtime.device.type == "cuda" else "cpu"), group=False)
    rank = Rank(runtime, alone, health, lambda: health.stop_asked)
    references: dict[object, reference.Reference] = {}
    for case in cases(runtime.world_size, own):
        key = case.config.optim, case.config.data.drop_last
        if key not in references:
            references[key] = reference.train(case.config, data, runtime.world_size)
        trained = train(case, rank, data)
        refuse_to_go_on_if_stopped(runtime, health)
        assert trained is not None, "it stopped without being asked to"
        yield compare(case, trained, references[key], runtime)


def _say(line: str) -> None:
    log.info(line)


def _own(text: str) -> str:
    if not IMPORT_PATH.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form module:Class")
    return text
