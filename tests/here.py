"""A launch by SSH without SSH: this machine in place of each host."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from train.launch import ssh
from train.launch.ssh_host import SshHost, UnreachableError
from train.launch.ssh_site import Site

ASKED = {"runtime": "venv", "device": "cpu", "share": "", "detach": "", "checkpoints": "true", "grace": "10"}


class Here(SshHost):
    """This machine in place of a host: what would go through SSH is run by a shell of it, in a home of its own."""

    user_home = "/nowhere"

    def run(self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout_s: float = 60.0) -> tuple[int, bytes, str]:
        if self._is_left:
            raise UnreachableError("left by Ctrl-C")
        given = stdin if isinstance(stdin, bytes) else b"".join(stdin)
        done = subprocess.run(
            ["sh", "-c", script], input=given, env={**os.environ, "HOME": self.user_home}, capture_output=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr.decode()


def with_hosts(site: Site, home: Path) -> Site:
    """The same with this machine for each of its hosts."""
    site.hosts = {login.name: Here(login) for login in site.logins}
    for host in site.hosts.values():
        assert isinstance(host, Here)
        host.user_home = str(home)
    return site


def launched(site: Site, results: Path, *command: str, **asked: Any) -> tuple[int, str]:
    said: list[str] = []
    given = {**ASKED, "script": list(command), **asked}
    code = ssh.launch(site, given, lambda words, size: [], results, said.append, time.monotonic())
    return code, "\n".join(said)
