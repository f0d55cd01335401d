"""Tasks of `fab` on a lab: started as a user would, with the lab's inventory, or an SSH configuration of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.launches import Launch, Site

FAB = Path(sys.executable).parent / "fab"
RELAY = """
import socket, threading, time
def pump(a, b):
    while data := a.recv(65536):
        b.sendall(data)
def serve(one):
    time.sleep(5)
    other = socket.create_connection(("127.0.0.1", 22))
    for pair in ((one, other), (other, one)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
listening = socket.create_server(("", 2222))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""
"""A port that leads to sshd; its first byte comes after five seconds."""
_IN_A_TERMINAL = """
import os, pty, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
said = b""
while b"node1 rank 0 | up" not in said:
    said += os.read(terminal, 4096)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
READERS = {
    "a terminal": [sys.executable, "-c", _IN_A_TERMINAL],
    "a pipe": ["sh", "-c", '"$@" | grep -m 1 "node1 rank 0 | up"', "sh"],
}
"""What a command's console is, until rank 0 is up; then it is no more."""


def fab(two: Site, task: str, *args: str, config: Path | None = None) -> Launch:
    """A task, started; on the inventory of the lab, or with an SSH configuration on node1 and node2."""
    hosts = ["--inventory", str(two.cluster.inventory)]
    if config is not None:
        hosts = ["--hosts", "node1:2,node2:2", "--ssh-config", str(config), "--device", "cpu"]
    results = ["--results", str(two.results)] if task in ("launch", "collect") else []
    launch = Launch(two, [str(FAB), task, *hosts, *results, *args])
    two.watch_over(launch)
    return launch


def done(two: Site, task: str, *args: str, config: Path | None = None) -> Launch:
    launch = fab(two, task, *args, config=config)
    launch.wait()
    return launch


def refused(launch: Launch) -> list[str]:
    """Why nothing was started: a line each."""
    assert launch.wait() == 3, launch.output
    _, found, reasons = launch.output.partition("muster: nothing was started (exit code 3: a host is not fit")
    assert found, launch.output
    return [line.strip() for line in reasons.splitlines()[1:]]


@contextmanager
def ssh_config(two: Site, tmp_path: Path, *lines: str, known_hosts: str | None = None) -> Iterator[Path]:
    """The lab's, with more for node2."""
    folder = two.cluster.folder / "hosts"
    text = (folder / "ssh_config").read_text()
    more = "".join(f"    {line}\n" for line in lines)
    if known_hosts is not None:
        (tmp_path / "known_hosts").write_text(known_hosts)
        text = re.sub(r'UserKnownHostsFile ".*"', f'UserKnownHostsFile "{tmp_path}/known_hosts"', text)
    path = tmp_path / "ssh_config"
    path.write_text(f"Host node2\n{more}{text}")
    yield path
