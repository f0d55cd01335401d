"""`python -m train node`: the agent of one host. It has a `Node` for its ranks and a `Half` for the other agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from train.errors import UsageError
from train.launch.afar import LOOK_S
from train.launch.clock import AwakeClock
from train.launch.follow import Follower
from train.launch.half import Half
from train.launch.keeper_pipe import KeeperPipe
from train.launch.lead import Leader
from train.launch.node import Node, tell_of_error
from train.launch.options import NodeOptions, parse
from train.launch.output import Console
from train.launch.ranks import become_subreaper
from train.launch.verdict import Verdict
from train.seam import SECRET_FILE, STOP_SIGNALS, Exit

_TWICE_S = 0.5
A_BUG = "a bug in Muster's agent (above): please report it"


def main(argv: Sequence[str]) -> int:
    """Run an agent to the end of the job; the verdict's exit code."""
    try:
        options = parse(argv, os.environ)
    except UsageError as error:
        print("nothing was started:", *(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return Exit.USAGE
    os.environ.pop(SECRET_FILE, None)
    return asyncio.run(_run(options))


async def _run(options: NodeOptions) -> int:
    return await Agent(options).run()


class Agent:
    """One host's agent."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.console = Console()
        self.keeper = KeeperPipe()
        self.node = Node(
            options.terms,
            options.node_rank,
            lambda message: self.half.tell(message),  # noqa: PLW0108 - there is no `half` yet
            self.console,
            self.keeper,
            options.run_id,
            options.runs_dir,
        )
        kind = Leader if options.node_rank == 0 else Follower
        self.half: Half = kind(options, self.node, self.console, AwakeClock())
        self._stop_asked_s: float | None = None

    async def run(self) -> int:
        """From the first hello to the last word."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        loop.set_exception_handler(self._failed_aside)
        for number in _heeded():
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGCHLD, self.node.children_ended)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what came while modules were loaded comes now
        if self.options.die_with_stdin:
            loop.add_reader(0, self._read_stdin)
        watching = asyncio.create_task(self._watch_lease())
        watching.add_done_callback(tell_of_error)
        try:
            verdict = await self.half.run()
        except UsageError as error:
            verdict = self._given_up(Exit.USAGE, "; ".join(error.problems))
        except Exception:
            self.console.line(traceback.format_exc().encode())
            verdict = self._given_up(Exit.BUG, A_BUG)
        watching.cancel()
        await self.node.end(now=True)
        self._say_how_it_ended(verdict)
        await self.half.close()
        self.keeper.say("farewell")
        self.node.close()
        self._report()
        self.console.close()
        for number in (*_heeded(), signal.SIGCHLD):  # nothing changes the status any more, nor trips a closing loop
            loop.add_signal_handler(number, lambda: None)
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        return verdict.exit_code

    def _failed_aside(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback: nobody waits for it, and the job could wait for ever. So it ends the job."""
        error = context.get("exception")
        if "handle" not in context or error is None:
            loop.default_exception_handler(context)
            return
        self.console.line("".join(traceback.format_exception(error)).encode())
        self._given_up(Exit.BUG, A_BUG)

    def _given_up(self, code: Exit, words: str) -> Verdict:
        self.half.decide(Verdict("failed", code, words))
        return self.half.verdict

    def _signalled(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        # A terminal and a launcher may both pass on the same Ctrl-C: that is one request.
        is_second = self._stop_asked_s is not None and now_s - self._stop_asked_s > _TWICE_S
        if number in (signal.SIGINT, signal.SIGTERM):  # Slurm sends USR2, then TERM: that is no impatience
            self._stop_asked_s = self._stop_asked_s or now_s
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.half.ask_to_stop(name, now=is_second and number in (signal.SIGINT, signal.SIGTERM))

    def _read_stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 1 << 12):
                asyncio.get_running_loop().remove_reader(0)
                self.half.ask_to_stop("the end of standard input (whoever started it is gone)", now=False)

    async def _watch_lease(self) -> None:
        """Whoever watches from another machine has no signal to send: a file must do."""
        clock = AwakeClock()
        while self.options.lease is not None:
            request = self.options.lease.look(clock.tick())
            if request is not None:
                self.half.ask_to_stop(request.by, now=False, from_afar=True)
            if request is not None and request.now:
                self.half.ask_to_stop(request.by, now=True, from_afar=True)
            await asyncio.sleep(LOOK_S)

    def _report(self) -> None:
        """The run as a page, once all else is said. Whatever goes wrong there is no matter of the job."""
        folder = self.node.folder.path
        if folder is None or self.options.node_rank != 0:
            return
        with contextlib.suppress(Exception):  # the verdict stays the last line; `python -m train report` tells why
            from train.report.command import make_report  # only now: an agent starts fast

            make_report(folder)

    def _say_how_it_ended(self, verdict: Verdict) -> None:
        folder = self.node.folder
        if folder.path is None:
            with contextlib.suppress(UsageError):  # it is another job's: that is the verdict
                self.node.look_for_folder()
        if folder.path is None and self.node.ranks and verdict.exit_code not in (Exit.FINISHED, Exit.USAGE):
            with contextlib.suppress(UsageError):  # it cannot be written: the console has all
                self.node.folder_is(self.options.runs_dir / f"failed-{verdict.start_id or self.node.start_id}")
        if verdict.exit_code == Exit.USAGE and self.node.starts <= 1:
            folder.discard()
        elif self.node.ranks:
            folder.conclude(verdict.as_dict(), replace=self.options.node_rank == 0)
        if verdict.evidence and verdict.exit_code != Exit.USAGE:
            is_hang = verdict.exit_code == Exit.HANG
            what = "where the ranks are" if verdict.rank is None else f"rank {verdict.rank}'s last lines"
            what = f"where rank {verdict.rank} is" if is_hang and verdict.rank is not None else what
            self.console.say(f"{what}:")
            self.console.line("".join(f"  | {line}\n" for line in verdict.evidence).encode())
        self.node.tell_afar({"phase": verdict.outcome} | ({} if verdict.step is None else {"step": verdict.step}))
        if folder.path is not None:
            self.console.say(f"run folder {folder.path}")
        self.console.say(verdict.line)


def _heeded() -> list[signal.Signals]:
    """What is a request to stop: under `nohup` the end of the terminal is none."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (is_kept and number == signal.SIGHUP)]
