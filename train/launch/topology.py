"""Hosts in a given order → ranks, master address and ports. Pure: resolves no name, probes no port, reads nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from train.errors import UsageError

FIRST_PORT, PORTS = 20000, 10000  # below 32768: what lies above, systems hand out to clients (ip_local_port_range)
CANDIDATES = 8
_STRIDE = 1574  # even, and its only common factor with PORTS is 2: 5000 steps before a port comes again
_TO_CONTROL = 3331  # odd: control ports are the odd ones where master ports are even

_NAME = re.compile(r"[\w:][\w.:%-]*")
_LOOPBACK = re.compile(
    r"localhost\d?(\.localdomain\d?)?|ip6-(localhost|loopback)|127(\.\d+){1,3}|[0:]*:0*1", re.IGNORECASE
)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NO_ADDRESS = re.compile(r"0(\.0){0,3}|[0:]*:[0:]*")


@dataclass(frozen=True)
class Host:
    """One machine: what people call it, where the others reach it, and how many ranks it takes."""

    name: str
    address: str
    slots: int


@dataclass(frozen=True)
class Plan:
    """Who gets which ranks, and where they meet. Host *i* is node rank *i*; host 0 is MASTER_ADDR."""

    hosts: tuple[Host, ...]
    master_ports: tuple[int, ...]
    """To be tried in this order by all agents alike; shares no port with `control_ports`."""
    control_ports: tuple[int, ...]
    run_id: str | None = None

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def master_addr(self) -> str:
        """Where rank 0 is."""
        return self.hosts[0].address

    def ranks(self, node_rank: int) -> range:
        """A host's ranks: they follow on those of the hosts before it."""
        return range(self._firsts[node_rank], self._firsts[node_rank + 1])

    @cached_property
    def _firsts(self) -> list[int]:
        """Each host's first rank, and the world size behind them: summed up once, not once a host."""
        return [0, *accumulate(host.slots for host in self.hosts)]

    def as_dict(self) -> dict[str, Any]:
        """The plan as `plan --json` prints it."""
        hosts = [
            {"name": host.name, "address": host.address, "node_rank": i, "slots": host.slots, "ranks": [*self.ranks(i)]}
            for i, host in enumerate(self.hosts)
        ]
        return {
            "run_id": self.run_id, "hosts": hosts, "world_size": self.world_size, "master_addr": self.master_addr,
            "master_ports": [*self.master_ports], "control_ports": [*self.control_ports],
        }  # fmt: skip

    def node_arguments(self, node_rank: int) -> list[str]:
        """What follows `python -m train node` on a host, up to the `--` before the ranks' command."""
        slots = [str(host.slots) for host in self.hosts]
        words = {
            "--nnodes": str(len(self.hosts)),
            "--node-rank": str(node_rank),
            "--nproc-per-node": slots[0] if len(set(slots)) == 1 else ",".join(slots),
            "--master-addr": self.master_addr,
            "--master-port": str(self.master_ports[0]),
            "--control-port": str(self.control_ports[0]),
            "--hosts": ",".join(host.name for host in self.hosts),
        }
        if self.run_id is not None:
            words["--run-id"] = self.run_id
        return [part for pair in words.items() for part in pair]


def make_plan(
    hosts: Iterable[Host],
    *,
    run_id: str | None = None,
    master_port: int | None = None,
    control_port: int | None = None,
    count: int = CANDIDATES,
) -> Plan:
    """The plan for these hosts, in this order. Raises UsageError with all that is wrong with them.

    Without a port the first one follows from the run id, or else from the hosts' names.
    """
    hosts = tuple(hosts)
    problems = [*_host_problems(hosts), *_port_problems(master_port, control_port)]
    if run_id is not None and not _RUN_ID.fullmatch(run_id):
        problems.append(f"--run-id: {run_id!r} must be letters, digits, '.', '_' or '-' (at most 128)")
    if problems:
        raise UsageError(problems)
    seed = " ".join(host.name for host in hosts) if run_id is None else run_id
    first = port_candidates(seed, 1)[0] if master_port is None else master_port
    return Plan(hosts, *ports_from(first, control_port, count), run_id)


def port_candidates(seed: str | int, count: int = CANDIDATES) -> tuple[int, ...]:
    """Ports to try in turn: the first one given, or following from a text such as the run id."""
    if isinstance(seed, str):
        seed = FIRST_PORT + int.from_bytes(hashlib.sha256(seed.encode(errors="surrogatepass")).digest(), "big") % PORTS
    return candidates_from(seed, count)


def candidates_from(first_port: int, count: int = CANDIDATES) -> tuple[int, ...]:
    """This port, then others from 20000 to 29999 that are even where it is even: the same wherever it is computed."""
    return (first_port, *(FIRST_PORT + (first_port + i * _STRIDE) % PORTS for i in range(1, count)))[:count]


def ports_from(
    master_port: int, control_port: int | None = None, count: int = CANDIDATES
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Candidates for MASTER_PORT and for the agents' own port; no port is among both."""
    if control_port is None:
        return candidates_from(master_port, count), candidates_from(
            FIRST_PORT + (master_port + _TO_CONTROL) % PORTS, count
        )
    others = control_port if (control_port - master_port) % 2 else control_port ^ 1
    master = [port for port in candidates_from(master_port, count + 1) if port != control_port]
    return tuple(master[:count]), (control_port, *candidates_from(others, count)[1:])


def is_loopback(address: str) -> bool:
    """Whether an address, as it is written, means the host that reads it. Looks nothing up."""
    bare = address.strip("[]").split("%")[0].lower().removeprefix("::ffff:")
    return bool(_LOOPBACK.fullmatch(bare) or _NO_ADDRESS.fullmatch(bare))


def _host_problems(hosts: Sequence[Host]) -> list[str]:
    """Everything that is wrong with a list of hosts, in words."""
    if not hosts:
        return ["no hosts were given: name at least one"]
    problems = []
    seen: dict[str, Host] = {}
    for host in hosts:
        for text in dict.fromkeys((host.name, host.address)):
            if not _NAME.fullmatch(text):
                problems.append(f"host {text!r} is no name or address: letters, digits, '.', '-', '_' and ':' make one")
        if host.slots < 1:
            problems.append(f"host {host.name} has {host.slots} slots: give at least 1, or leave the host out")
        same = next((seen[key] for key in (host.name.lower(), host.address.lower()) if key in seen), None)
        if same is not None and same.name.lower() == host.name.lower():
            problems.append(f"host {host.name} is named twice: name it once, with the sum of its slots")
        elif same is not None:
            problems.append(f"hosts {same.name} and {host.name} have the same address {host.address}")
        seen |= {host.name.lower(): host, host.address.lower(): host}
    if len(hosts) > 1 and is_loopback(hosts[0].address):
        problems.append(
            f"host {hosts[0].name} comes first, so its address {hosts[0].address} is the master's, but on each of the "
            f"{len(hosts)} hosts that means the host itself: give an address that the others can reach"
        )
    return problems


def _port_problems(master_port: int | None, control_port: int | None) -> list[str]:
    given = {"master port": master_port, "control port": control_port}
    problems = [
        f"{name} {port} must be from 1 to 65535"
        for name, port in given.items()
        if port is not None and not 0 < port < 65536
    ]
    if master_port is not None and master_port == control_port:
        problems.append(f"master port and control port are both {master_port}: give two")
    return problems
