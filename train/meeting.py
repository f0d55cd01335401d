"""Where ranks meet: a store on rank 0's host in which all sign in, or the names of those who do not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from train.errors import JoinError, UsageError
from train.identity import Identity, is_loopback


def meet(me: Identity, card: str, timeout_s: float) -> tuple[Store, list[str]]:
    """The store in which all ranks have signed in, and what each wrote there, in rank order.

    Args:
        me: this rank's place.
        card: what to write; the host's name first.
        timeout_s: all must have come by then.

    Raises:
        JoinError: names the ranks that did not come.
        UsageError: the port or the rank is taken.
    """
    if me.world_size == 1:
        return HashStore(), [card]
    deadline = time.monotonic() + timeout_s
    store = _open_store(me, timeout_s)
    # A restart by torchrun meets in the same store: each attempt gets names of its own.
    store = PrefixStore(f"muster/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    names = [f"host/{rank}" for rank in range(me.world_size)]
    try:
        if store.add(f"seat/{me.rank}", 1) > 1:
            raise UsageError(
                f"rank {me.rank} has joined at {me.master_addr}:{me.master_port} already: another job uses this port, "
                "or two processes were given the same rank; give this job another --master-port (or MASTER_PORT)"
            )
        store.set(names[me.rank], card)
        while not store.check(names):
            # Rank 0 judges; the others wait a little longer, in case it is rank 0 that never comes.
            if time.monotonic() > deadline + (0.0 if me.rank == 0 else 2.0):
                store.set("verdict", _who_is_missing(me, store, timeout_s))
            if store.check(["verdict"]):
                verdict = store.get("verdict").decode()
                _leave(me, store, names)
                raise JoinError(verdict)
            time.sleep(0.02)
        return store, [store.get(name).decode() for name in names]
    except dist.DistError as error:
        raise JoinError(
            f"rank {me.rank} lost rank 0's store at {me.master_addr}:{me.master_port} while joining ({error}): "
            "rank 0 has ended; see its log"
        ) from None


def _leave(me: Identity, store: Store, names: Sequence[str]) -> None:
    """Rank 0 keeps the store until the others have read why it failed, two seconds at most."""
    store.set(f"left/{me.rank}", "")
    present = [name.replace("host", "left") for name in names if store.check([name])]
    deadline = time.monotonic() + 2.0
    while me.rank == 0 and not store.check(present) and time.monotonic() < deadline:
        time.sleep(0.02)


def _open_store(me: Identity, timeout_s: float) -> Store:
    assert me.master_addr is not None and me.master_port is not None
    # Under torchrun the launcher itself keeps the store, and every rank is a guest.
    hosts_it = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            me.master_addr,
            me.master_port,
            me.world_size,
            is_master=hosts_it,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        if hosts_it and "EADDRINUSE" in str(error):
            raise UsageError(
                f"port {me.master_port} is already in use on {socket.gethostname()}: another job has it; "
                "give all ranks another --master-port (or MASTER_PORT)"
            ) from None
        raise JoinError(
            f"rank {me.rank} could not reach rank 0 at {me.master_addr}:{me.master_port} within {timeout_s:g} s "
            f"({_reason(me.master_addr, error)}): check the address and that a firewall lets the port through"
        ) from None


def _reason(address: str, error: Exception) -> str:
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return f"the name {address} is unknown on this host"
    return "nobody listens there" if is_loopback(address) else "no answer"


def _who_is_missing(me: Identity, store: Store, timeout_s: float) -> str:
    here, missing = [], []
    for rank in range(me.world_size):
        name = f"host/{rank}"
        if store.check([name]):
            here.append(f"{rank} ({store.get(name).decode().split()[0]})")
        else:
            missing.append(str(rank))
    return (
        f"rank {_list(missing)} of {me.world_size} did not join within {timeout_s:g} s; rank {_list(here)} did: "
        "look at the log of what should have started the missing ones, "
        "or allow more time with --runtime.join_timeout_s"
    )


def _list(words: Sequence[str]) -> str:
    return ", ".join(words) if len(words) <= 16 else f"{', '.join(words[:16])} and {len(words) - 16} more"
