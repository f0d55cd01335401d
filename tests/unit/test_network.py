"""Which interface leads to the others: asked of the routing table, with fakes where the kernel would answer."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from train.network import interface_towards

ROUTES = {  # where to, and the address this host would send from
    "10.0.0.1": "10.0.0.7", "10.9.0.1": "10.9.0.7", "127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.7",
    "fe80::1": "fe80::7%eth1", "10.77.0.1": "10.77.0.99",
}  # fmt: skip
INTERFACES = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.7"], "eth1": ["fe80::7%eth1"],
              "ib0": ["aa:bb", "10.9.0.7"]}  # fmt: skip


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with several interfaces, docker0 among them."""
    table = dict(ROUTES)

    class Probe:
        def __init__(self, *_: object) -> None:
            self.source = ""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, target: tuple[str, int]) -> None:
            if target[0] not in table:
                raise OSError(101, "Network is unreachable")
            self.source = table[target[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.source, 40000

    addresses = {name: [SimpleNamespace(address=a) for a in found] for name, found in INTERFACES.items()}
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    return table


@pytest.mark.parametrize(("master", "name"), [("10.0.0.1", "eth0"), ("10.9.0.1", "ib0"), ("fe80::1", "eth1")])
def test_the_interface_is_the_one_that_routes_to_the_master(routes: object, master: str, name: str) -> None:
    assert interface_towards(master, spans_hosts=True) == name
    assert interface_towards(master, spans_hosts=False) == name


def test_a_loopback_route_is_right_on_one_host_only(routes: object) -> None:
    assert interface_towards("127.0.1.1", spans_hosts=False) == "lo"
    assert interface_towards("127.0.1.1", spans_hosts=True) == "eth0"


def test_nothing_is_said_where_nothing_routes_out(routes: dict[str, str]) -> None:
    assert interface_towards("10.55.0.1", spans_hosts=True) is None
    assert interface_towards("10.77.0.1", spans_hosts=True) is None  # an address that no interface has
    del routes["192.0.2.1"]
    assert interface_towards("127.0.1.1", spans_hosts=True) is None


def test_the_real_kernel_leads_to_this_host_by_loopback() -> None:
    name = interface_towards("127.0.0.1", spans_hosts=False)
    assert name is not None
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]


def test_an_unknown_name_has_no_interface() -> None:
    too_long = ".".join(["x" * 60] * 5)  # no resolver asks for it
    assert interface_towards(too_long, spans_hosts=False) is None


@pytest.mark.parametrize("name", ["node1..cluster", ".cluster", "x" * 64])
def test_a_name_that_cannot_be_one_has_no_interface(name: str) -> None:
    assert interface_towards(name, spans_hosts=True) is None
