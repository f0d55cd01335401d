"""Agent 0 among the agents: where the others call, and the supervisor that hears them all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train import network
from train.errors import UsageError
from train.launch import wire
from train.launch.chronicle import Chronicle
from train.launch.clock import AwakeClock
from train.launch.half import Half, asleep
from train.launch.node import Node
from train.launch.options import NodeOptions
from train.launch.output import Console
from train.launch.supervise import Supervisor
from train.launch.verdict import Verdict
from train.launch.wire import Message, SecretError, Wire, WireError

_PENDING = 256
_STRANGERS_TOLD = 20
ANOTHER_JOB = "the agent there belongs to another job: another command, --run-id, --master-addr or --master-port"


class Leader(Half):
    """The half of agent 0."""

    def __init__(self, options: NodeOptions, node: Node, console: Console, clock: AwakeClock) -> None:
        super().__init__(options, node, console, clock)
        self.supervisor = Supervisor(self.terms, self._send, self._record, self._free_port, clock.tick())
        self._chronicle = Chronicle(node.folder, self.supervisor, clock.now())
        self._server: asyncio.Server | None = None
        self._wires: dict[int, Wire] = {}
        self._callers: dict[asyncio.StreamWriter, None] = {}
        self._strangers = 0
        self._reservation: socket.socket | None = None
        self._is_due = False

    async def open(self) -> None:
        """Choose the run folder, and take calls."""
        self._choose_folder()
        nnodes = len(self.terms.plan.hosts)
        if nnodes > 1:
            _allow_connections(nnodes)
            self._server = await self._listen()
        refusal = self.supervisor.join(0, self.greeting(), self.clock.now())
        assert refusal is None, refusal
        count = self.terms.plan.world_size
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        more = f"on {nnodes} hosts, waiting for {nnodes - 1} more" if nnodes > 1 else "on this host"
        self.console.say(f"{ranks} {more}")

    def tell(self, message: Message) -> None:
        """Its own node speaks to the supervisor directly."""
        self._chronicle.hear(0, message)
        self.supervisor.hear(0, message, self.clock.now())
        self._soon()

    def tick(self, now_s: float) -> None:
        """The supervisor judges."""
        if self.clock.slept_s:
            self.supervisor.sleep(asleep(self.clock.slept_s), now_s)
            self.clock.slept_s = 0.0
        self.supervisor.tick(now_s)
        self._chronicle.tick(now_s)
        if self.supervisor.verdict is not None:
            super().decide(self.supervisor.verdict)

    def decide(self, verdict: Verdict) -> None:
        """Also where it was not the supervisor that decided: the others hear of it."""
        super().decide(self.supervisor.give_up(verdict))

    async def close(self) -> None:
        """The others have had the verdict: wait till it is sent."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(each.close() for each in self._wires.values()))

    def _soon(self) -> None:
        """Do not wait for the next tick; once for all that came together, for a look at all hosts costs."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        self.supervisor.tick(self.clock.now())

    def _record(self, event: str, **facts: Any) -> None:
        self.node.folder.record(event, **facts)
        self._chronicle.note(event)
        if event == "restart":
            self.console.say(f"{facts['after']}\nstarting again ({facts['number']} of {facts['of']}), {facts['where']}")
        elif event == "port taken":
            self.console.say("somebody else was quicker at the port: starting again with the next one")

    def _choose_folder(self) -> None:
        """A script that is not ours gets a run folder now; `train run` finds its own, and tells."""
        run_id = self.options.run_id
        if run_id is None:
            if self.terms.is_ours:
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
            self._note_stranger(
                writer, str(error) or type(error).__name__, has_secret=not isinstance(error, SecretError)
            )
            writer.transport.abort()
            return
        finally:
            self._callers.pop(writer, None)
        node_rank = greeting.get("node_rank")
        if not isinstance(node_rank, int):
            writer.transport.abort()
            return
        is_ours = greeting.get("job") == self.greeting()["job"]
        refusal = self.supervisor.join(node_rank, greeting, self.clock.now()) if is_ours else ANOTHER_JOB
        peer_wire = wire.answer(reader, writer, key, {"refused": refusal, "host": self.node.name})
        if refusal is not None:
            self._note_stranger(writer, f"{greeting.get('host')}: {refusal}", has_secret=True)
            await peer_wire.close()
            self._soon()
            return
        before = self._wires.pop(node_rank, None)
        if before is not None:  # it calls again
            before.abort()
        self._wires[node_rank] = peer_wire
        if self.node.interface is None:
            self.node.interface = network.interface_of(peer_wire.local_address)
        self.console.say(f"host {self.supervisor.name(node_rank)} is here")
        await self._hear(node_rank, peer_wire)

    def _note_stranger(self, writer: asyncio.StreamWriter, why: str, *, has_secret: bool) -> None:
        """The first few one by one, then fewer and fewer: nobody fills the disk by knocking."""
        self._strangers += 1
        count, peer = self._strangers, writer.get_extra_info("peername")
        if peer and not has_secret and count <= _STRANGERS_TOLD:
            self.supervisor.strangers[str(peer[0]).removeprefix("::ffff:")] = None
        if count <= _STRANGERS_TOLD or str(count).strip("0") == "1":
            self.node.folder.record("stranger", count=count, address=str(peer[0]) if peer else None, why=why)

    async def _hear(self, node_rank: int, peer: Wire) -> None:
        try:
            while True:
                message = await peer.receive()
                self._chronicle.hear(node_rank, message)
                self.supervisor.hear(node_rank, message, self.clock.now())
                if message["kind"] != "beat":
                    self._soon()
        except (EOFError, OSError):
            why = "the connection of its agent ended (the agent or its host was killed or rebooted)"
        except (WireError, LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
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
            super().decide(Verdict(**message["verdict"]))
        else:
            asyncio.get_running_loop().call_soon(self.node.obey, message)

    def _free_port(self, ports: Iterable[int]) -> int:
        """A port on which nobody listens, and that no other job's agent has given to ranks which still load torch.

        Its ranks would meet ours there. The reservation is a name, not the port itself, which rank 0 needs: an
        abstract socket (unix(7)) belongs to one network namespace as ports do, and goes when this process does.
        """
        if self._reservation is not None:
            self._reservation.close()
        for port in ports:
            self._reservation = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                self._reservation.bind(f"\0muster-master-port-{port}")
                if _is_free(port):
                    return port
            self._reservation.close()
        raise UsageError(f"none of the ports {', '.join(map(str, ports))} is free: give another --master-port")


def _allow_connections(count: int) -> None:
    """As many open files as agents will call, where the usual limit of 1024 is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _PENDING + 200
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_free(port: int) -> bool:
    """Whether nobody listens there, by IPv4 or IPv6."""
    families = (socket.AF_INET, socket.AF_INET6) if socket.has_ipv6 else (socket.AF_INET,)
    for family in families:
        try:
            socket.create_server(("", port), family=family, backlog=1).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
