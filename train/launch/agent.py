"""`python -m train node`: the agent of one host. Agent 0 also supervises the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train import __version__, network
from train.errors import UsageError
from train.launch import wire
from train.launch.node import KeeperPipe, Node, is_ours
from train.launch.options import NodeOptions, parse
from train.launch.output import Console
from train.launch.ranks import become_subreaper
from train.launch.supervise import LOST_AFTER_S, Supervisor
from train.launch.verdict import Verdict
from train.launch.wire import Message, Wire, WireError
from train.seam import SECRET_FILE, Exit

TICK_S = 0.2
_PENDING = 256
_STRANGERS_TOLD = 20
_AGAIN_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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


class AwakeClock:
    """A clock that stands still while this process does not run: frozen, suspended, or starved of its processor."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._awake_s = 0.0
        self.awake_since_s = self._last_s
        """Since when, on the host's monotonic clock, it has run without a break."""
        self.slept_s = 0.0
        """How long it did not run, where that was so long that the others must have given this host up."""

    def now(self) -> float:
        """Seconds awake."""
        return self._awake_s + min(time.monotonic() - self._last_s, 1.0)

    def tick(self) -> float:
        """Call it several times a second; seconds awake."""
        now_s = time.monotonic()
        gone_s, self._last_s = now_s - self._last_s, now_s
        self._awake_s += min(gone_s, 1.0)
        if gone_s > 2.0:
            self.awake_since_s = now_s
        if gone_s > LOST_AFTER_S:
            self.slept_s = gone_s
        return self._awake_s


class Agent:
    """One host's agent."""

    def __init__(self, options: NodeOptions) -> None:
        self.options, self.terms = options, options.terms
        self.console = Console()
        self.clock = AwakeClock()
        self.keeper = KeeperPipe()
        self.node = Node(
            self.terms, options.node_rank, self._tell, self.console, self.keeper, options.run_id, options.runs_dir
        )
        self.supervisor: Supervisor | None = None
        self._wires: dict[int, Wire] = {}
        self._to_agent_0: Wire | None = None
        self._callers: dict[asyncio.StreamWriter, None] = {}
        self._strangers = 0
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._stop_asked_s: float | None = None
        self._heard_s = 0.0

    async def run(self) -> int:
        """From the first hello to the last word."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGCHLD, self.node.children_ended)
        if self.options.die_with_stdin:
            loop.add_reader(0, self._read_stdin)
        try:
            verdict = await (self._lead() if self.options.node_rank == 0 else self._follow())
        except UsageError as error:
            verdict = Verdict("failed", Exit.USAGE, "; ".join(error.problems))
        except Exception:
            self.console.line(traceback.format_exc().encode())
            verdict = Verdict("failed", Exit.BUG, "a bug in Muster's agent (above): please report it")
        if self.supervisor is not None:
            verdict = self.supervisor.give_up(verdict)
        await self.node.end(now=True)
        self._say_how_it_ended(verdict)
        for each in list(self._wires.values()):  # agents that hang up meanwhile leave the table
            await each.close()
        self.keeper.say("farewell")
        self.node.close()
        self.console.close()
        return verdict.exit_code

    # Agent 0.

    async def _lead(self) -> Verdict:
        self._choose_folder()
        nnodes = len(self.terms.plan.hosts)
        self.supervisor = Supervisor(self.terms, self._send, self._record, self._free_port, self.clock.tick())
        server = await self._listen() if nnodes > 1 else None
        greeting = _greeting(self.options)
        assert self.supervisor.join(0, greeting, self.clock.now()) is None
        count = self.terms.plan.world_size
        where = f"on {nnodes} hosts" if nnodes > 1 else "on this host"
        self.console.say(
            f"{count} rank{'s' * (count > 1)} {where}"
            + (f", waiting for {nnodes - 1} more hosts" if nnodes > 1 else "")
        )
        while not self._verdict.done():
            self._tick()
            await asyncio.wait([self._verdict], timeout=TICK_S)
        if server is not None:
            server.close()
        return self._verdict.result()

    def _record(self, event: str, **facts: Any) -> None:
        self.node.folder.record(event, **facts)
        if event == "restart":
            self.console.say(
                f"{facts['after']}\nstarting again ({facts['number']} of {facts['of']}) from the last checkpoint"
            )
        elif event == "port taken":
            self.console.say("somebody else was quicker at the port: starting again with the next one")

    def _choose_folder(self) -> None:
        """A script that is not ours gets a run folder now; `train run` finds its own, and tells."""
        run_id = self.options.run_id
        if run_id is None:
            if is_ours(self.terms.command):
                return
            script = next((Path(word).stem for word in self.terms.command if word.endswith(".py")), "run")
            run_id = f"{script}-{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"
        self.node.folder_is(self.options.runs_dir / run_id)
        if self.node.folder.take_stop_file():
            self.console.say(f"an old STOP file lay in {self.node.folder.path}: taken away")

    async def _listen(self) -> asyncio.Server:
        ports = self.terms.plan.control_ports
        for port in ports:
            try:
                server = await asyncio.start_server(self._welcome, None, port, limit=1 << 16, backlog=1024)
            except OSError:
                self.console.say(f"control port {port} is taken on this host: trying the next one")
                continue
            return server
        raise UsageError(f"none of the control ports {', '.join(map(str, ports))} is free: give another --control-port")

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody calls. Whoever cannot prove to be of this job is sent away, and changes nothing."""
        if len(self._callers) >= _PENDING:  # the oldest goes: an agent of ours is through in no time
            oldest = next(iter(self._callers))
            del self._callers[oldest]
            oldest.transport.abort()
        self._callers[writer] = None
        try:
            key, greeting = await wire.greet(reader, writer, self.options.secret)
        except (WireError, EOFError, OSError, TimeoutError) as error:
            self._note_stranger(writer, str(error) or type(error).__name__)
            writer.transport.abort()
            return
        finally:
            self._callers.pop(writer, None)
        node_rank = greeting.get("node_rank")
        assert self.supervisor is not None
        if not isinstance(node_rank, int):
            writer.transport.abort()
            return
        refusal = self.supervisor.join(node_rank, greeting, self.clock.now())
        peer_wire = wire.answer(reader, writer, key, {"refused": refusal})
        if refusal is not None:
            self.console.say(f"an agent on {greeting.get('host')} was refused: {refusal}")
            await peer_wire.close()
            return
        self._wires[node_rank] = peer_wire
        if self.node.interface is None:
            self.node.interface = network.interface_of(peer_wire.local_address)
        self.console.say(f"host {self.supervisor.name(node_rank)} is here")
        await self._hear(node_rank, peer_wire)

    def _note_stranger(self, writer: asyncio.StreamWriter, why: str) -> None:
        """The first few one by one, then fewer and fewer: nobody fills the disk by knocking."""
        self._strangers += 1
        count, peer = self._strangers, writer.get_extra_info("peername")
        if count <= _STRANGERS_TOLD or str(count).strip("0") == "1":
            self.node.folder.record("stranger", count=count, address=str(peer[0]) if peer else None, why=why)

    async def _hear(self, node_rank: int, peer: Wire) -> None:
        assert self.supervisor is not None
        try:
            while True:
                message = await peer.receive()
                self.supervisor.hear(node_rank, message, self.clock.now())
                self._soon()
        except (EOFError, OSError):
            why = "the connection of its agent ended (the agent or its host was killed or rebooted)"
        except (WireError, KeyError, TypeError, ValueError, AssertionError) as error:
            why = f"its agent sent what cannot be understood ({type(error).__name__}: {error})"
        peer.abort()
        if self._wires.get(node_rank) is peer:
            del self._wires[node_rank]
            self.supervisor.lose(node_rank, why, self.clock.now())
            self._soon()

    def _send(self, node_rank: int, message: Message) -> None:
        if message["kind"] == "start":
            message = {**message, "run_id": self.node.folder.path.name if self.node.folder.path else None}
        if node_rank != 0:
            if node_rank in self._wires:
                self._wires[node_rank].send(message)
        elif message["kind"] == "verdict":
            if not self._verdict.done():
                self._verdict.set_result(Verdict(**message["verdict"]))
        else:
            asyncio.get_running_loop().call_soon(self.node.obey, message)

    def _free_port(self, ports: Iterable[int]) -> int:
        for port in ports:
            with contextlib.suppress(OSError), socket.create_server(("", port), backlog=1):
                return port
        raise UsageError(f"none of the ports {', '.join(map(str, ports))} is free: give another --master-port")

    # The others.

    async def _follow(self) -> Verdict:
        called = await self._call_agent_0()
        if isinstance(called, Verdict):
            return called
        self._to_agent_0 = called
        self._heard_s = self.clock.tick()
        self.node.interface = network.interface_of(called.local_address)
        listening = asyncio.create_task(self._listen_to_agent_0(called))
        while not self._verdict.done():
            self._tick()
            if self.clock.now() - self._heard_s > LOST_AFTER_S:
                why = f"no word from it for {LOST_AFTER_S:g} s (the network between was cut, or it is frozen)"
                await self._orphaned(why)
            await asyncio.wait([self._verdict], timeout=TICK_S)
        listening.cancel()
        self._wires[0] = called
        return self._verdict.result()

    async def _call_agent_0(self) -> Wire | Verdict:
        plan, began_s = self.terms.plan, time.monotonic()
        ports = plan.control_ports
        seen: dict[int, str] = {}
        self.console.say(f"host {self.options.node_rank} of {len(plan.hosts)}: calling agent 0 at {plan.master_addr}")
        while time.monotonic() - began_s < self.terms.join_timeout_s:
            for port in ports:
                if self._verdict.done():  # a stop request
                    return self._verdict.result()
                try:
                    called, answer = await wire.call(
                        plan.master_addr, port, self.options.secret, _greeting(self.options), 3.0
                    )
                except (OSError, EOFError, WireError, TimeoutError) as error:
                    seen[port] = str(error) or type(error).__name__
                    continue
                if answer.get("refused"):
                    called.abort()
                    return Verdict("failed", Exit.USAGE, f"agent 0 refused this agent: {answer['refused']}")
                return called
            await asyncio.sleep(_AGAIN_S)
        told = "; ".join(f"port {port}: {why}" for port, why in list(seen.items())[:3])
        return Verdict(
            "failed",
            Exit.NEVER_JOINED,
            f"agent 0 at {plan.master_addr} did not answer within {self.terms.join_timeout_s:g} s ({told})",
            advice="is it started, is the address right, does a firewall let the port through, is the secret the same?",
        )

    async def _listen_to_agent_0(self, called: Wire) -> None:
        try:
            while True:
                message = await called.receive()
                self._heard_s = self.clock.now()
                if message["kind"] == "verdict":
                    if not self._verdict.done():
                        self._verdict.set_result(Verdict(**message["verdict"]))
                    return
                if message["kind"] == "start" and message.get("run_id") and self.node.folder.path is None:
                    self.node.folder_is(self.options.runs_dir / message["run_id"])
                self.node.obey(message)
        except (EOFError, OSError):
            await self._orphaned("the connection to its agent ended (the agent or its host was killed or rebooted)")
        except (WireError, KeyError, TypeError, ValueError) as error:
            await self._orphaned(f"it sent what cannot be understood ({error})")

    async def _orphaned(self, why: str) -> None:
        """Agent 0 is gone, or cannot be reached: this host ends its ranks by itself."""
        if self._verdict.done():
            return
        name, node_rank = self.terms.name_of(0) or self.terms.plan.master_addr, 0
        self.clock.tick()
        if self.clock.slept_s:
            name, node_rank, why = self.node.name, self.node.node_rank, _asleep(self.clock.slept_s)
        words = f"host {name} (node rank {node_rank}) was lost: {why}"
        self._verdict.set_result(Verdict("failed", Exit.HOST_LOST, words, name, node_rank))

    # Both.

    def _tell(self, message: Message) -> None:
        """The node's word to agent 0."""
        if self.supervisor is not None:
            self.supervisor.hear(0, message, self.clock.now())
            self._soon()
        elif self._to_agent_0 is not None:
            self._to_agent_0.send(message)

    def _tick(self) -> None:
        now_s = self.clock.tick()
        self.node.tick(now_s, self.clock.awake_since_s)
        if self.supervisor is not None:
            if self.clock.slept_s:
                self.supervisor.sleep(_asleep(self.clock.slept_s), now_s)
                self.clock.slept_s = 0.0
            self.supervisor.tick(now_s)

    def _soon(self) -> None:
        """Do not wait for the next tick."""
        assert self.supervisor is not None
        asyncio.get_running_loop().call_soon(lambda: self.supervisor.tick(self.clock.now()))  # type: ignore[union-attr]

    def _signalled(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        is_second = self._stop_asked_s is not None and now_s - self._stop_asked_s > 0.5
        self._stop_asked_s = self._stop_asked_s or now_s
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._ask_to_stop(name, now=is_second and number in (signal.SIGINT, signal.SIGTERM))

    def _ask_to_stop(self, by: str, *, now: bool = False) -> None:
        if self.supervisor is None and self._to_agent_0 is None:
            if not self._verdict.done():
                self._verdict.set_result(Verdict("stopped", Exit.STOPPED_UNSAVED, f"stopped by {by} before it began"))
            return
        self._tell({"kind": "stop", "by": by, "now": now})

    def _read_stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 1 << 12):
                asyncio.get_running_loop().remove_reader(0)
                self._ask_to_stop("the end of standard input (whoever started it is gone)")

    def _say_how_it_ended(self, verdict: Verdict) -> None:
        folder = self.node.folder
        if folder.path is None and self.node.ranks and verdict.exit_code not in (Exit.FINISHED, Exit.USAGE):
            self.node.folder_is(self.options.runs_dir / f"failed-{verdict.start_id or self.node.start_id}")
        if verdict.exit_code == Exit.USAGE:
            folder.discard()
        elif self.node.ranks:
            folder.conclude(verdict.as_dict(), replace=self.options.node_rank == 0)
        if verdict.evidence and verdict.exit_code != Exit.USAGE:
            is_hang = verdict.exit_code == Exit.HANG
            what = "where the ranks are" if verdict.rank is None else f"rank {verdict.rank}'s last lines"
            what = f"where rank {verdict.rank} is" if is_hang and verdict.rank is not None else what
            self.console.say(f"{what}:")
            self.console.line("".join(f"  | {line}\n" for line in verdict.evidence).encode())
        if folder.path is not None:
            self.console.say(f"run folder {folder.path}")
        self.console.say(verdict.line)


def _asleep(slept_s: float) -> str:
    return f"it did not run for {slept_s:.0f} s (frozen, suspended or starved), so the others have gone on without it"


def _greeting(options: NodeOptions) -> dict[str, Any]:
    terms = options.terms
    return {
        "node_rank": options.node_rank,
        "nnodes": len(terms.plan.hosts),
        "nproc": terms.plan.hosts[options.node_rank].slots,
        "host": socket.gethostname(),
        "version": __version__,
    }
