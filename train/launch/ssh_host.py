"""One host by SSH: connected with its key checked, commands with a deadline, and what is done there by our own Python.

Fabric makes the connection, so ~/.ssh/config counts: names, users, ports, keys, jump hosts. What Fabric lacks is here:
a key that is unknown or has changed is refused, and nothing waits without an end. No word of a user's becomes part of a
command line: what is to be done comes on the command's standard input.
"""

from __future__ import annotations

import base64
import errno
import getpass
import json
import logging
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabric
import paramiko
from paramiko.ssh_exception import AuthenticationException, BadHostKeyException, NoValidConnectionsError, SSHException

from train.launch.polling import Answered

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it would print its tracebacks; what they mean is told here
CONNECT_S, ANSWER_S, KEEPALIVE_S = 12.0, 60.0, 5
_ROLE = Path(__file__).resolve().parents[2] / "ansible" / "roles" / "job" / "module_utils"
_SENT = ("muster_launch", "muster_states")
# Whatever shell a user has there, it sees these words alone. `read` takes one line, and no byte of what follows.
_ANY_SHELL = """exec sh -c 'read -r words; eval "$(printf %s "$words" | base64 -d)"'"""
_THERE = Path(__file__).with_name("ssh_there.py")


class UnreachableError(Exception):
    """A host could not be asked, and why."""


@dataclass(frozen=True)
class Login:
    """How to get to a host."""

    name: str
    host: str
    """An address, or a name that ~/.ssh/config or the network knows."""
    user: str | None = None
    port: int | None = None
    key_file: str | None = None
    config: Path | None = None
    """In place of ~/.ssh/config."""


class SshHost:
    """A host that is connected to, or will be; its methods may be called by several threads."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._connecting = threading.Lock()
        self._connection: fabric.Connection | None = None
        self._is_left = False

    def connect(self) -> fabric.Connection:
        """Be connected. Raises UnreachableError, after CONNECT_S at the latest for each address and step."""
        with self._connecting:
            if self._is_left:
                raise UnreachableError("left by Ctrl-C")
            if self._connection is not None and self._connection.is_connected:
                return self._connection
            self.close()
            try:
                self._connection = self._opened()
                return self._connection
            except (OSError, EOFError, SSHException, paramiko.ConfigParseError) as error:
                raise UnreachableError(self._why(error)) from None

    def _opened(self) -> fabric.Connection:
        login = self.login
        config = fabric.Config(runtime_ssh_path=str(login.config)) if login.config else fabric.Config()
        more: dict[str, Any] = {"banner_timeout": CONNECT_S, "auth_timeout": CONNECT_S, "channel_timeout": CONNECT_S}
        if login.key_file:
            more |= {"key_filename": login.key_file, "look_for_keys": False}
        connection = fabric.Connection(
            login.host,
            user=login.user,
            port=login.port,
            config=config,
            connect_timeout=int(CONNECT_S),
            connect_kwargs=more,
        )
        wanted = connection.ssh_config
        if wanted.get("identitiesonly", "").lower() == "yes":
            connection.connect_kwargs["allow_agent"] = False
        # Fabric itself would accept any key it has not seen.
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        given = shlex.split(wanted.get("userknownhostsfile", ""))
        for file in given or ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]:
            if Path(file).expanduser().is_file():
                connection.client.load_system_host_keys(str(Path(file).expanduser()))
        for file in shlex.split(wanted.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts")):
            if Path(file).is_file():
                connection.client.load_system_host_keys(file)
        connection.open()
        connection.transport.set_keepalive(KEEPALIVE_S)
        return connection

    def _why(self, error: Exception) -> str:
        login = self.login
        where = login.host if login.port is None else f"[{login.host}]:{login.port}"
        if isinstance(error, BadHostKeyException):
            return (
                "its host key is not the one that known_hosts has: either the machine was set up anew (then: "
                f"ssh-keygen -R {shlex.quote(where)}), or something else answers in its place"
            )
        if "not found in known_hosts" in str(error):
            scan = f"ssh-keyscan {f'-p {login.port} ' if login.port else ''}{shlex.quote(login.host)}"
            return f"its host key is not known: {scan} >>~/.ssh/known_hosts, and compare it with the machine's own"
        if isinstance(error, AuthenticationException):
            return f"it lets nobody in with the keys that were offered ({error}): ssh-copy-id, or another user or key"
        if isinstance(error, NoValidConnectionsError):
            errors = {str(one.strerror or one) for one in error.errors.values()}
            return f"{where}: {', '.join(sorted(errors))}"
        if re.search("protocol banner|No existing session", str(error)):
            return f"{where} takes connections, but has not talked SSH for {CONNECT_S:g} s: frozen, busy, no sshd?"
        if isinstance(error, TimeoutError | socket.timeout):
            return f"{where} has not answered for {CONNECT_S:g} s"
        if isinstance(error, socket.gaierror):
            return f"there is no host {login.host} (the name cannot be resolved)"
        return f"{where}: {error or type(error).__name__}"

    def run(
        self, script: str, stdin: bytes | Iterable[bytes] = b"", timeout_s: float = ANSWER_S
    ) -> tuple[int, bytes, str]:
        """What a script for `sh` does: exit code, output, errors. Raises UnreachableError."""
        deadline_s = time.monotonic() + timeout_s
        try:
            channel = self.connect().transport.open_session(timeout=min(timeout_s, CONNECT_S))
        except (OSError, EOFError, SSHException) as error:
            raise UnreachableError(self._why(error)) from None
        output = bytearray()
        try:
            channel.exec_command(_ANY_SHELL)
            channel.settimeout(timeout_s)
            channel.sendall(base64.b64encode(script.encode()) + b"\n")
            for piece in [stdin] if isinstance(stdin, bytes) else stdin:
                channel.sendall(piece)
            channel.shutdown_write()
            while True:
                channel.settimeout(max(0.01, deadline_s - time.monotonic()))
                piece = channel.recv(1 << 16)
                if not piece:
                    break
                output += piece
            errors = channel.makefile_stderr("rb").read().decode("utf-8", "replace")
            if not channel.status_event.wait(max(0.01, deadline_s - time.monotonic())):
                raise TimeoutError
            return channel.recv_exit_status(), bytes(output), errors
        except TimeoutError:
            raise UnreachableError(f"it has not answered for {timeout_s:g} s") from None
        except (OSError, EOFError, SSHException) as error:
            raise UnreachableError(f"the connection broke: {error or type(error).__name__}") from None
        finally:
            channel.close()

    def poll(self, script: str) -> Answered:
        """`run`, for train.launch.polling."""
        code, output, errors = self.run(script, timeout_s=20.0)
        return Answered(code, output.decode("ascii", "replace"), errors)

    def read(self, script: str, stdin: bytes | Iterable[bytes] = b"") -> bytes:
        """What a script writes. Raises UnreachableError, and OSError where it fails."""
        code, output, errors = self.run(script, stdin, timeout_s=600.0)
        if code:
            raise OSError(f"{script[:80]}: {reason_in(errors) or f'exit code {code}'}")
        return output

    def ask(self, state: str, given: Mapping[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What `STATES[state]` of muster_states.py tells there; `failed` and `msg` where it cannot be. Never raises.

        It is run by the host's own Python: it needs no packages.
        """
        sources = {f"ansible.module_utils.{name}": (_ROLE / f"{name}.py").read_text("utf-8") for name in _SENT}
        told = json.dumps({"sources": sources, "state": state, "given": dict(given)})
        try:
            program = f"{_THERE.read_text('utf-8')}\n\nmain({told!r})\n"
            code, output, errors = self.run("exec python3 -I -", program.encode(), timeout_s)
        except UnreachableError as error:
            return {"unreachable_why": str(error), "unreachable": True}
        if code == 127:
            return {"failed": True, "msg": "there is no python3 on it (3.9 or later): apt-get install python3"}
        try:
            answer: dict[str, Any] = json.loads(output)
        except ValueError:
            lines = [line for line in errors.splitlines() if line.strip()]
            return {"failed": True, "msg": f"{lines[-1] if lines else 'it answered nothing'} (exit code {code})"}
        return answer

    def leave(self) -> None:
        """Part for good: whoever waits for an answer stops waiting, and nobody is connected any more."""
        self._is_left = True
        self.close()

    def close(self) -> None:
        """Part."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def reason_in(errors: str) -> str:
    """The line of a command's errors that says why: one in the system's own words, else the first."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    known = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)]
    if any("Wrote only" in line for line in lines):  # tar's words, where the disk takes a part of a file
        lines.append(f"the disk is full: {known[0]}")
    return next((line for line in lines if any(words in line for words in known)), lines[0] if lines else "")


def who() -> str:
    """Who sits here."""
    return f"{getpass.getuser()} on {socket.gethostname()}"
