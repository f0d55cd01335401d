"""Many hosts with real sshd on this machine: each has an address, a host key and a home folder of its own.

They are in one network namespace, so that nothing of them is on the machine's network; whoever is to reach them is
started by `Endpoints.inside`. What is sent to an address that nobody has is lost, and nobody is told. Needs root,
openssh-server and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from train.launch import keeper

SLOW_S = 5.0
"""Until the first byte of a slow one."""
_NET = """
ip link set lo up
ip link add nowhere type veth peer name nobody
ip link set nobody up
ip link set nowhere arp off up
ip route add default dev nowhere
for address do ip address add "$address/32" dev lo; done
echo up
exec sleep infinity
"""
_SSHD = """Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {key}.pub
SetEnv HOME={folder}/home
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
LogLevel ERROR
"""
_RELAY = """
import socket, sys, threading, time
def pump(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_WR)
def serve(one):
    time.sleep(float(sys.argv[2]))
    other = socket.create_connection((sys.argv[1], 2222))
    for pair in ((one, other), (other, one)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
listening = socket.create_server((sys.argv[1], 22))
while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""


def why_not() -> str | None:
    """Why there can be none here; None where there can."""
    if os.geteuid() != 0:
        return "hosts with sshd on this machine need root"
    if _sshd() is None:
        return "there is no sshd: apt-get install openssh-server"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces are not permitted here: {tried.stderr.strip()}"


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Endpoints:
    """`count` of them, from 0."""

    def __init__(self, count: int, folder: Path, *, refusing: Sequence[int] = (), slow: Sequence[int] = (),
                 dead: Sequence[int] = ()) -> None:  # fmt: skip
        """
        Args:
            count: of them all.
            folder: for keys and homes.
            refusing: those whose port is closed.
            slow: those whose sshd answers after `SLOW_S`.
            dead: those that are not there: whatever is sent to them is lost.
        """
        self.folder = folder
        self.addresses = [f"10.78.{number // 250}.{number % 250 + 1}" for number in range(count)]
        self.config = folder / "ssh_config"
        self._servers: list[subprocess.Popen[bytes]] = []
        self._key = folder / "key"
        _make_key(self._key)
        there = [address for number, address in enumerate(self.addresses) if number not in dead]
        self._net = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-ec", _NET, "sh", *there],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert self._net.stdout is not None
            assert self._net.stdout.readline() == "up\n", "no network came to be"
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
            known = [self._serve(number, number in slow, {*refusing, *dead}) for number in range(count)]
            (folder / "known_hosts").write_text("".join(known))
            self.config.write_text(
                f"Host *\n  User root\n  IdentityFile {self._key}\n  IdentitiesOnly yes\n  BatchMode yes\n"
                f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
                "  StrictHostKeyChecking yes\n  ConnectTimeout 15\n"
            )
            until(lambda: self._listening() >= count - len({*refusing, *dead}), 120)
        except BaseException:
            self.remove()
            raise

    def _serve(self, number: int, slow: bool, without: set[int]) -> str:
        """Start one; its line for known_hosts."""
        address, folder = self.addresses[number], self.folder / f"host{number}"
        (folder / "home").mkdir(parents=True)
        _make_key(folder / "host_key")
        text = _SSHD.format(port=2222 if slow else 22, address=address, folder=folder, key=self._key)
        (folder / "sshd_config").write_text(text)
        if number not in without:
            sshd = _sshd()
            assert sshd is not None
            self._start(sshd, "-D", "-e", "-f", str(folder / "sshd_config"), log=folder / "sshd.log")
        if slow:
            self._start(sys.executable, "-c", _RELAY, address, str(SLOW_S), log=folder / "relay.log")
        return f"{address} {(folder / 'host_key.pub').read_text()}"

    def _start(self, *command: str, log: Path) -> None:
        with log.open("wb") as output:
            self._servers.append(
                subprocess.Popen(self.inside(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )

    def _listening(self) -> int:
        found = subprocess.run(
            self.inside("ss", "-Hltn", "sport = :22"), capture_output=True, text=True, check=True
        ).stdout
        return len(found.splitlines())

    def inside(self, *command: str) -> list[str]:
        """The command, where it reaches them."""
        return ["nsenter", "-t", str(self._net.pid), "-n", "--", *command]

    def home(self, number: int) -> Path:
        """Its user's."""
        return self.folder / f"host{number}" / "home"

    def left(self) -> dict[int, str]:
        """What runs of any job there."""
        mark = f"HOME={self.folder}/".encode()
        return {
            pid: (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            for pid in keeper.processes()
            if any(entry.startswith(mark) for entry in keeper.environment_of(pid))
        }

    def agent(self, number: int) -> int:
        """The process id of its agent."""
        mark = f"HOME={self.home(number)}".encode()
        return min(
            pid for pid, words in self.left().items()
            if words.startswith(f"{sys.executable} -m train node ") and mark in keeper.environment_of(pid)
        )  # fmt: skip

    def remove(self) -> None:
        """End all of it."""
        with contextlib.suppress(OSError):
            for pid in self.left():
                os.kill(pid, signal.SIGKILL)
        for server in self._servers:
            server.kill()
        for server in self._servers:
            server.wait()
        self._net.kill()
        self._net.communicate()


@contextlib.contextmanager
def endpoints(count: int, folder: Path, **more: Sequence[int]) -> Iterator[Endpoints]:
    """That many; all is removed at the end."""
    made = Endpoints(count, folder, **more)
    try:
        yield made
    finally:
        made.remove()


def until(condition: Callable[[], object], timeout_s: float) -> float:
    """Look until it holds; the seconds it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, f"it never came to that within {timeout_s:g} s"
        time.sleep(0.05)
    return time.monotonic() - began_s


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "muster", "-f", str(path)], check=True)
