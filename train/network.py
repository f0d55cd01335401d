"""Which network interface leads to the other hosts. Both planes may import it, so it must be cheap to."""

from __future__ import annotations

import socket


def interface_towards(address: str, *, spans_hosts: bool) -> str | None:
    """Name of the interface whose route leads to `address`; None where that cannot be told.

    On rank 0's own host its name may mean loopback (Debian's 127.0.1.1). The others cannot come in there, so
    with more than one host the interface of the default route is taken instead.
    """
    local = _source_address(address)
    if local is not None and spans_hosts and (local == "::1" or local.startswith("127.")):
        local = _source_address("192.0.2.1") or _source_address("2001:db8::1")  # documentation addresses, RFC 5737/3849
    return None if local is None else interface_of(local)


def interface_of(local_address: str) -> str | None:
    """Name of the interface that has this address of the host; None where there is none."""
    import psutil

    local = local_address.removeprefix("::ffff:")  # IPv4 seen through an IPv6 socket
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == local for entry in addresses):
            return name
    return None


def interfaces() -> list[str]:
    """Names of this host's interfaces."""
    import psutil

    return sorted(psutil.net_if_addrs())


def _source_address(address: str) -> str | None:
    """Address this host would send from; asks the routing table, sends nothing (connect(2) on UDP)."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).split("%")[0]
    except (OSError, UnicodeError):  # UnicodeError: no name that could be looked up
        return None
