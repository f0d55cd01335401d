"""Between hosts: each one calls all others, proves itself, and finds out what comes of it. Nobody is in charge.

Each host listens on the first free port of the plan's, and on one that the system hands out, as Gloo and NCCL do.
A call goes to both. Over the first one, clocks are compared; over the second, bytes are sent as fast as they go.
A host leaves when all others have said that they are done with it, or when its patience ends.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from train.launch import wire
from train.launch.topology import Plan
from train.launch.wire import Message, SecretError, Wire, WireError

CONNECT_S = 4.0
"""A busy host takes long to answer."""
AT_ONCE = 32
"""Calls that a host makes at a time."""
PINGS = 5
RATE_S, PIECE = 0.4, b"\0" * (1 << 18)
_SEND_BUFFER = 1 << 20  # what is on its way when the time is up must not take long on a slow link
MOST_CALLED = 128
"""With more hosts than these, each one calls so many others: all pairs would be too many."""
_ENOUGH_S = 8.0
"""A host that is there, as it has called us, but cannot be reached in this time, will not be."""


@dataclass
class Call:
    """What came of calling another host."""

    node_rank: int
    reached: bool = False
    why: str = "it was not there"
    """Why it was not reached: in words for people."""
    port: int | None = None
    answered_by: int | None = None
    """The node rank that was found there, if it is another one."""
    called_us: bool = False
    identity: str | None = None
    round_trip_ms: float | None = None
    ahead_s: float | None = None
    """Its clock against ours."""
    mb_per_s: float | None = None
    """From us to it."""
    credential: str | None = None
    """What it says of the credential that munge gave us."""


def partners(node_rank: int, hosts: int) -> list[int]:
    """Whom a host calls: all others, or with very many hosts those that follow it."""
    return [(node_rank + step) % hosts for step in range(1, min(hosts, MOST_CALLED + 1))]


def rated(node_rank: int, hosts: int) -> list[int]:
    """To whom a host sends for speed: the next one, and the one after it. So a slow host is told from a slow pair."""
    return [(node_rank + step) % hosts for step in range(1, min(hosts, 3))]


class Meeting:
    """One host's part in it."""

    def __init__(self, plan: Plan, node_rank: int, secret: bytes, patience_s: float, identity: str) -> None:
        self.plan, self.node_rank, self._secret = plan, node_rank, secret
        self._deadline_s = time.monotonic() + patience_s
        count = len(plan.hosts)
        self.calls = {rank: Call(rank) for rank in partners(node_rank, count)}
        self.heard: set[int] = set()
        """Who has called us."""
        self.ports: list[int] = []
        self.taken: list[int] = []
        """Ports of the plan that somebody else has."""
        self.check_credential: Callable[[str], str] | None = None
        self._me: Message = {"node_rank": node_rank, "identity": identity}
        self._wires: dict[int, Wire] = {}
        self._done: set[int] = set()
        self._news = asyncio.Event()
        self._told: dict[int, Message] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen."""
        servers = [await self._listen_on_a_port_of_the_plan(), await self._listen(0)]
        self.ports = [server.sockets[0].getsockname()[1] for server in servers if server is not None]
        self._me["ports"] = self.ports
        if self.node_rank == 0:
            self._me["store_port"] = _free_port()
        self._servers = [server for server in servers if server is not None]

    async def _listen_on_a_port_of_the_plan(self) -> asyncio.Server | None:
        for port in self.plan.master_ports:
            try:
                return await self._listen(port)
            except OSError:
                self.taken.append(port)
        return None

    async def _listen(self, port: int) -> asyncio.Server:
        if socket.has_dualstack_ipv6():
            try:
                both = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
                return await asyncio.start_server(self._answer, sock=both)
            except PermissionError:
                raise
            except OSError as error:
                if "in use" in str(error):
                    raise
        return await asyncio.start_server(self._answer, "0.0.0.0", port, backlog=512)  # noqa: S104

    # Answering.

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            key, greeting = await wire.greet(reader, writer, self._secret)
            connection = wire.answer(reader, writer, key, self._me)
            if greeting.get("pours"):
                await self._count(connection)
                return
            rank = int(greeting["node_rank"])
            self._told[rank] = greeting
            self.heard.add(rank)
            self._news.set()
            while True:
                said = await connection.receive()
                if said.get("done"):
                    self._done.add(rank)
                    self._news.set()
                elif "credential" in said:
                    connection.send({"credential": await self._judged(str(said["credential"]))})
                else:
                    connection.send({"time_s": time.time()})
        except (WireError, OSError, EOFError, TimeoutError, KeyError, ValueError):
            pass
        finally:
            writer.close()

    async def _judged(self, credential: str) -> str | None:
        if self.check_credential is None:
            return None
        return await asyncio.to_thread(self.check_credential, credential)

    @staticmethod
    async def _count(connection: Wire) -> None:
        reader, _ = connection.raw
        count = 0
        while piece := await reader.read(1 << 20):
            count += len(piece)
        connection.send({"bytes": count})
        await connection.close()

    # Calling.

    async def call_all(self) -> None:
        """Call everybody, until each one has answered or will not."""
        slots = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._call(call, slots) for call in self.calls.values()))

    async def _call(self, call: Call, slots: asyncio.Semaphore) -> None:
        began_s = time.monotonic()
        attempt = 0
        while True:
            told = self._told.get(call.node_rank)
            ports = [told["ports"][0]] if told else list(self.plan.master_ports)
            call.port = ports[attempt % len(ports)]
            async with slots:
                if await self._try(call, call.port):
                    return
            attempt += 1
            left_s = self._deadline_s - time.monotonic()
            if call.node_rank in self.heard and time.monotonic() - began_s > _ENOUGH_S:
                left_s = 0.0
            if left_s <= 0:
                return
            await asyncio.sleep(min(0.2, left_s) if attempt % len(ports) == 0 else 0)

    async def _try(self, call: Call, port: int) -> bool:
        address = self.plan.hosts[call.node_rank].address
        try:
            connection, answer = await wire.call(address, port, self._secret, self._me, CONNECT_S)
        except Exception as error:
            call.why = _why(error)
            return False
        call.answered_by = int(answer["node_rank"])
        call.identity = str(answer["identity"])
        if call.answered_by != call.node_rank:
            call.why = f"{self.plan.hosts[call.answered_by].name} answers there"
            connection.abort()
            return False
        self._wires[call.node_rank] = connection
        self._told[call.node_rank] = answer
        try:
            await asyncio.wait_for(self._compare_clocks(call, connection), CONNECT_S)
            call.port = answer["ports"][-1]
            second, _ = await wire.call(address, call.port, self._secret, {**self._me, "pours": True}, CONNECT_S)
            second.abort()
        except Exception as error:
            call.why = _why(error)
            return False
        call.reached, call.why = True, ""
        return True

    @staticmethod
    async def _compare_clocks(call: Call, connection: Wire) -> None:
        """By the quickest of some round trips, as NTP does (RFC 5905): the way there and back taken as equal."""
        for _ in range(PINGS):
            sent_s, began_s = time.time(), time.perf_counter()
            connection.send({"ping": True})
            told = await connection.receive()
            took_s = time.perf_counter() - began_s
            if call.round_trip_ms is None or took_s * 1000 < call.round_trip_ms:
                call.round_trip_ms = took_s * 1000
                call.ahead_s = float(told["time_s"]) - (sent_s + took_s / 2)

    async def pour(self) -> None:
        """Send to the next hosts as fast as it goes, one after the other."""
        for rank in rated(self.node_rank, len(self.plan.hosts)):
            call = self.calls[rank]
            if call.reached:
                call.mb_per_s = await self._within(self._poured(rank), None)

    async def _poured(self, rank: int) -> float:
        port = self._told[rank]["ports"][-1]
        greeting = {**self._me, "pours": True}
        connection, _ = await wire.call(self.plan.hosts[rank].address, port, self._secret, greeting, CONNECT_S)
        _, writer = connection.raw
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < RATE_S:
            writer.write(PIECE)
            await writer.drain()
        writer.write_eof()
        count = int((await connection.receive())["bytes"])
        took_s = time.perf_counter() - began_s
        connection.abort()
        return count / took_s / 1e6

    async def show_credential(self, credential: str) -> None:
        """Let the next host say what it thinks of it."""
        for rank in rated(self.node_rank, len(self.plan.hosts))[:1]:
            if self.calls[rank].reached:
                self.calls[rank].credential = await self._within(self._shown(rank, credential), None)

    async def _shown(self, rank: int, credential: str) -> str | None:
        self._wires[rank].send({"credential": credential})
        said = (await self._wires[rank].receive())["credential"]
        return None if said is None else str(said)

    async def _within(self, work: Coroutine[Any, Any, Any], otherwise: Any) -> Any:
        try:
            return await asyncio.wait_for(work, max(1.0, self._deadline_s - time.monotonic()))
        except (WireError, OSError, EOFError, TimeoutError, KeyError, ValueError):
            return otherwise

    # Together.

    async def until(self, what: Callable[[], bool]) -> bool:
        """Whether it comes to that before the patience ends."""
        while not what():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(0.0, self._deadline_s - time.monotonic()))
            except TimeoutError:
                return what()
        return True

    async def all_have_called(self) -> bool:
        """Whether everybody who should has called us."""
        count = len(self.plan.hosts)
        expected = {rank for rank in range(count) if self.node_rank in partners(rank, count)}
        return await self.until(lambda: expected <= self.heard)

    async def part(self) -> None:
        """Leave, once nobody who has called us still wants something."""
        for connection in self._wires.values():
            connection.send({"done": True})
        await self.until(lambda: self.heard <= self._done)
        for server in self._servers:
            server.close()
        await asyncio.gather(*(connection.close() for connection in self._wires.values()), return_exceptions=True)

    @property
    def is_complete(self) -> bool:
        """Whether we reached everybody we called."""
        return all(call.reached for call in self.calls.values())

    @property
    def store_port(self) -> int | None:
        """Where the first host's ranks meet."""
        told = self._me if self.node_rank == 0 else self._told.get(0, {})
        return told.get("store_port")

    def as_list(self) -> list[dict[str, Any]]:
        """All calls, for JSON."""
        for call in self.calls.values():
            call.called_us = call.node_rank in self.heard
        return [asdict(call) for call in self.calls.values()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _why(error: BaseException) -> str:
    if isinstance(error, SecretError):
        return "whoever answers there belongs to another job"
    if isinstance(error, WireError | EOFError):
        return "something else listens there"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
