"""A check that runs as ranks: who this process is, where the others are, how it ends; as in `python -m train run`.

Free of torch until the ranks meet: a bad option is refused at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from train.config import RuntimeConfig
from train.errors import ContactError, MusterError, UsageError
from train.failure import Failure, failure_of
from train.health import Health
from train.identity import Identity, identify
from train.options import split_launch_options
from train.progress import log, log_to_console
from train.seam import Exit, Phase

if TYPE_CHECKING:
    from train.runtime import Runtime

LAUNCHING = """As ranks of any launcher; without one, as a single rank:
  python -m train node --standalone --nproc-per-node 4 -- {name}
  torchrun --nproc-per-node 4 -m train {name}
  srun python -m train {name}
or by hand, --rank, --world-size, --master-addr and --master-port on each."""


class CheckFailedError(MusterError):
    """What was checked on this rank is not as it must be."""


class StoppedError(MusterError):
    """The check was asked to stop."""

    exit_code = Exit.STOPPED_UNSAVED


class Parser(argparse.ArgumentParser):
    """Help that keeps its lines, and errors that are told as any other."""

    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"python -m train {name}", description=description,
            epilog=f"{LAUNCHING.format(name=name)}\n\n{epilog}",
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        where = self.add_argument_group("where, and how long to wait")
        where.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one"
        )
        where.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="auto: nccl on cuda")
        where.add_argument("--interface", metavar="NAME", help="network interface (the one that routes to rank 0)")
        where.add_argument("--join-timeout-s", type=float, default=120.0, metavar="S", help="for all to come (120)")
        where.add_argument("--step-timeout-s", type=float, default=60.0, metavar="S", help="for one operation (60)")

    def error(self, message: str) -> NoReturn:
        """Told with all other problems."""
        raise UsageError(message)


def at_least(low: float, kind: type = int) -> Callable[[str], float]:
    """The type of an option that is a number with a least value."""

    def number(text: str) -> float:
        value: float = kind(text)
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be at least {low:g}")
        return value

    return number


def run_as_rank(
    parser: Parser, argv: Sequence[str], check: Callable[[Runtime, Health, argparse.Namespace], None]
) -> int:
    """Parse, meet the other ranks, check; an exit code. A rank that fails leaves at once, as in `train/cli.py`.

    Args:
        parser: of the check's own options.
        argv: those and the launch options.
        check: raises MusterError where something is wrong; imports what needs torch itself.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the user's own module:name, also for the `train` script
    me, health = Identity(), Health()
    try:
        health = Health.from_environment(os.environ)
        launch, rest = split_launch_options(argv)
        found = parser.parse_args(rest)
        me = identify(launch, os.environ)
    except UsageError as error:
        health.tell_failure("usage", Exit.USAGE, "\n".join(error.problems))
        print(*error.problems, sep="\n", file=sys.stderr)
        return Exit.USAGE
    log_to_console(me.rank, me.world_size, has_agent=health.has_agent)
    if me.rank:
        log.setLevel(logging.WARNING)  # all ranks find the same: it is told once
    try:
        return _join_and_check(me, health, found, check)
    except BaseException as error:
        failure = _failure_of(error)
        health.tell_failure(*failure)  # before anything that could block
        is_expected = isinstance(error, MusterError | KeyboardInterrupt)
        # One rank that found something says so; the others, which did not, need not repeat it.
        if not isinstance(error, ContactError) or me.rank == 0:
            for line in (failure.words if is_expected else traceback.format_exc()).splitlines():
                log.error(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.exit_code)


def _join_and_check(
    me: Identity,
    health: Health,
    found: argparse.Namespace,
    check: Callable[[Runtime, Health, argparse.Namespace], None],
) -> int:
    config = RuntimeConfig(
        device=found.device, backend=found.backend, interface=found.interface, join_timeout_s=found.join_timeout_s,
        first_step_timeout_s=max(60.0, found.step_timeout_s), step_timeout_s=found.step_timeout_s,
        save_timeout_s=max(300.0, found.step_timeout_s),
    )  # fmt: skip
    health.start(config)
    from train.collective_errors import in_words
    from train.runtime import Runtime

    who = f"rank {me.rank}"
    with in_words(who, lambda: (Phase.STARTING, "while starting")):
        runtime = Runtime(me, config, has_agent=health.has_agent)
    who = f"rank {me.rank} ({runtime.host})"
    with in_words(who, lambda: (health.phase, "in the check")):
        check(runtime, health, found)
        health.enter(Phase.ENDING, health.step)
        runtime.close()
    return Exit.FINISHED


def tell_together(runtime: Runtime, mine: Sequence[str]) -> None:
    """End in good order where no rank has anything to complain of. Raises CheckFailedError and ContactError.

    Args:
        runtime: this rank's ties.
        mine: what this rank found wrong.
    """
    told = runtime.gather((runtime.host, list(mine)))
    if mine:
        raise CheckFailedError("\n".join(mine))
    guilty = [f"{rank} ({host})" for rank, (host, theirs) in enumerate(told) if theirs]
    if guilty:
        first = next(theirs[0] for _, theirs in told if theirs)
        raise ContactError(f"rank {', '.join(guilty)} found something wrong: {first}")


def refuse_unwritable(runtime: Runtime, *paths: Path | None) -> None:
    """Before anything is measured: rank 0 must be able to write there. Raises UsageError on all ranks."""

    def look() -> None:
        for path in paths:
            if (
                runtime.rank == 0
                and path is not None
                and not os.access(path if path.exists() else path.parent, os.W_OK)
            ):
                raise UsageError(f"cannot write {path}: name a file in a folder that is there and writable")

    runtime.together(look)


def refuse_to_go_on_if_stopped(runtime: Runtime, health: Health) -> None:
    """Whether the agent asks to stop, on all ranks alike. Raises StoppedError."""
    if any(runtime.gather(health.stop_asked)):
        raise StoppedError("stopped on request, before the check was through")


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, StoppedError):
        return Failure("interrupted", error.exit_code, str(error))
    return failure_of(error)
