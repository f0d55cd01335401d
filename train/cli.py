"""`python -m train <command>`: a table of commands, each imported only when it is called."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from train import __version__
from train.errors import MusterError, UsageError
from train.seam import STOP_SIGNALS, Exit

if TYPE_CHECKING:
    from train.identity import Identity

USAGE = """usage: python -m train COMMAND [options]

commands:
  run        train as one rank of a job: python -m train run --config ddp
  node       start this host's ranks, watch them, end together: python -m train node --standalone
             --nproc-per-node 2 -- run --config ddp
  plan       hosts → ranks, addresses, ports: python -m train plan --hosts a,b --nproc-per-node 8
  preflight  is this host fit, and all hosts together: python -m train preflight
  watch      hosts and ranks of a run as it goes: python -m train watch RUN
  report     a run, or several beside each other, as one page of HTML: python -m train report RUN
  stop       ask a run to save and stop: python -m train stop RUN
  collectives  is every collective operation right, how fast is it, which host is slow
  pitfalls   the usual mistakes, seen to go wrong on real ranks, and right: python -m train pitfalls
  drill      prove that nothing is lost: python -m train drill --config ddp --kills 5
  verify     are all ways to train the same: max |Δ| of gradients and weights, on the ranks at hand
  checkpoints  list, verify or export what a run has saved: python -m train checkpoints ls RUN
  sample     what a gpt of yours writes: python -m train sample RUN --prompt 'Once'
  explain    why a run ended, or what a log file tells: python -m train explain RUN

python -m train COMMAND --help tells more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, as in `train/seam.py`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {"run": run}
    commands |= {name: partial(_launch, name) for name in ("node", "plan", "stop", "explain", "preflight")}
    commands |= {name: partial(_tool, module) for name, module in _TOOLS.items()}
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return Exit.FINISHED
    if arguments and arguments[0] == "--version":
        print(f"muster {__version__}")
        return Exit.FINISHED
    if not arguments or arguments[0] not in commands:
        print(f"{'no command given' if not arguments else f'no command {arguments[0]!r}'}\n\n{USAGE}", file=sys.stderr)
        return Exit.USAGE
    return commands[arguments[0]](arguments[1:])


_TOOLS = {
    "collectives": "checks.collectives.command",
    "drill": "checks.drill",
    "pitfalls": "checks.pitfalls",
    "verify": "checks.verify.command",
    "checkpoints": "shelf",
    "sample": "sample",
    "report": "report.command",
    "watch": "watching",
}
"""Commands of the training plane beside `run`, and their modules."""


def _tool(module: str, argv: list[str]) -> int:
    return int(import_module(f"train.{module}").main(argv))


def _launch(name: str, argv: list[str]) -> int:
    """A command of the launch plane: only its own module is imported."""
    if name == "node":  # a request to stop may come while its modules are loaded: it waits until the agent can hear it
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    module = import_module(f"train.launch.{'agent' if name == 'node' else name}")
    return int(module.main(argv))


def run(argv: list[str]) -> int:
    """Train as one rank. A rank that fails leaves at once: its teardown must never become the others' hang."""
    # What needs no torch comes first: a bad config is told at once, and so is a sign of life.
    from train.failure import failure_of
    from train.health import Health
    from train.identity import Identity, identify
    from train.options import checked_config, read_config, split_launch_options
    from train.progress import log, log_to_console

    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the user's own module:function, also for the `train` script
    me, health = Identity(), Health()
    problems: list[str] = []
    try:
        health = Health.from_environment(os.environ)
        options, rest = split_launch_options(argv)
        if any(word in ("-h", "--help") or word.startswith("--print_config") for word in rest):
            read_config(rest)
        try:
            me = identify(options, os.environ)
        except UsageError as error:
            problems += error.problems
        log_to_console(me.rank, me.world_size, has_agent=health.has_agent)
        config = checked_config(rest, me.world_size)
        health.start(config.runtime)
    except UsageError as error:
        problems += error.problems
    if problems:
        health.tell_failure("usage", Exit.USAGE, "\n".join(problems))
        return _refuse(problems, me, names_rank=not health.has_agent)
    log.info(
        f"muster: {config.strategy.name} · {config.model.name} on {config.data.name} · "
        f"rank {me.rank} of {me.world_size} ({me.source}) · loading torch"
    )
    try:
        gc.disable()  # loading torch makes a million objects that stay: looking through them on the way costs a tenth
        from train.job import run as run_job

        gc.enable()
        gc.freeze()  # nor are they looked through while it trains

        code = run_job(config, options, me, health)
        if code == Exit.STOPPED_UNSAVED:
            health.tell_failure("interrupted", code, "stopped on request, but the last steps could not be saved")
        return code
    except BaseException as error:
        failure = failure_of(error)
        health.tell_failure(*failure)  # before anything that could block
        is_expected = isinstance(error, MusterError | KeyboardInterrupt)
        for line in (failure.words if is_expected else traceback.format_exc()).splitlines():
            log.error(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.exit_code)


def _refuse(problems: list[str], me: Identity, *, names_rank: bool) -> int:
    """Tell what is wrong with config or environment, once a host: a file may be missing on one of them."""
    if me.rank == 0 or not me.local_rank:
        who = f"rank {me.rank}: " if me.rank and names_rank else ""
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{who}{count}, nothing was started:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
    return Exit.USAGE
