"""Messages between agents: JSON over TCP, each proven to come from somebody who knows the job's secret.

Handshake: the listener sends a nonce; the caller sends its own nonce and its greeting, proven over both; the
listener's answer is proven over both too. From then on each message is

    length (4 bytes, big endian) · HMAC-SHA256 (32 bytes) of key, direction, counter and text · text (JSON)

where the key follows from the secret and both nonces. So what was recorded cannot be played again, neither in
another connection (nonces) nor in the same one (counter). Contents are not secret, and are not hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

NONCE_BYTES = 16
PROOF_BYTES = 32
LONGEST_GREETING = 4096
LONGEST_MESSAGE = 1 << 20
HANDSHAKE_S = 5.0
_HELLO = b"muster-1"

Message = dict[str, Any]


class WireError(Exception):
    """The other end is none of this job, or does not keep to the form."""


class SecretError(WireError):
    """The other end does not know the job's secret."""


class Wire:
    """A proven connection; either end may send at any time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, is_caller: bool
    ) -> None:
        self._reader, self._writer = reader, writer
        self._key = key
        self._mine, self._theirs = (b"caller", b"listener") if is_caller else (b"listener", b"caller")
        self._sent = self._received = 0

    @property
    def local_address(self) -> str:
        """This host's address on the connection."""
        return str(self._writer.get_extra_info("sockname")[0]).split("%")[0]

    @property
    def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The bare connection, for bytes that are only counted."""
        return self._reader, self._writer

    @property
    def backlog_bytes(self) -> int:
        """What waits to be sent: the other end does not take it."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        """Queue a message; never waits."""
        text = json.dumps(message).encode()
        assert len(text) <= LONGEST_MESSAGE, f"a message of {len(text)} bytes"
        if not self._writer.is_closing():
            self._writer.write(_framed(self._key, self._mine, self._sent, text))
            self._sent += 1

    async def receive(self) -> Message:
        """The next message. Raises WireError for one that is not proven, EOFError or OSError at the end."""
        text = await _read_framed(self._reader, self._key, self._theirs, self._received, LONGEST_MESSAGE)
        self._received += 1
        return _parsed(text)

    async def close(self) -> None:
        """Send what is queued, a second at most, and part."""
        try:
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def abort(self) -> None:
        """Part at once."""
        self._writer.transport.abort()


async def call(host: str, port: int, secret: bytes, greeting: Message, timeout_s: float) -> tuple[Wire, Message]:
    """Connect, prove, greet; the connection and the listener's answer. Raises WireError, OSError, EOFError."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            hello = await reader.readexactly(len(_HELLO) + NONCE_BYTES)
            if not hello.startswith(_HELLO):
                raise WireError("what listens there is no agent of Muster")
            theirs, mine = hello[len(_HELLO) :], secrets.token_bytes(NONCE_BYTES)
            key = _session_key(secret, theirs, mine)
            writer.write(mine + _framed(key, b"greeting", 0, json.dumps(greeting).encode()))
            try:
                answer = await _read_framed(reader, key, b"answer", 0, LONGEST_MESSAGE)
            except asyncio.IncompleteReadError:
                raise WireError("the agent there has another secret: it belongs to another job") from None
        except BaseException:
            writer.transport.abort()
            raise
    return Wire(reader, writer, key, is_caller=True), _parsed(answer)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> tuple[bytes, Message]:
    """The listener's half of the handshake: the key and the caller's greeting. Raises WireError, EOFError, OSError."""
    async with asyncio.timeout(HANDSHAKE_S):
        mine = secrets.token_bytes(NONCE_BYTES)
        writer.write(_HELLO + mine)
        theirs = await reader.readexactly(NONCE_BYTES)
        key = _session_key(secret, mine, theirs)
        return key, _parsed(await _read_framed(reader, key, b"greeting", 0, LONGEST_GREETING))


def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, message: Message) -> Wire:
    """Answer a greeting; the connection from here on."""
    writer.write(_framed(key, b"answer", 0, json.dumps(message).encode()))
    return Wire(reader, writer, key, is_caller=False)


def _session_key(secret: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret, _HELLO + listener + caller, hashlib.sha256)


def _proof(key: bytes, direction: bytes, counter: int, text: bytes) -> bytes:
    return hmac.digest(key, direction + counter.to_bytes(8, "big") + text, hashlib.sha256)


def _framed(key: bytes, direction: bytes, counter: int, text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + _proof(key, direction, counter, text) + text


async def _read_framed(reader: asyncio.StreamReader, key: bytes, direction: bytes, counter: int, longest: int) -> bytes:
    head = await reader.readexactly(4 + PROOF_BYTES)
    length = int.from_bytes(head[:4], "big")
    if length > longest:
        raise WireError(f"a message of {length} bytes was announced; {longest} are allowed")
    text = await reader.readexactly(length)
    if not hmac.compare_digest(head[4:], _proof(key, direction, counter, text)):
        raise SecretError("the secret is another one")
    return text


def _parsed(text: bytes) -> Message:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a message that is no JSON") from None
    if not isinstance(found, dict):
        raise WireError("a message that is no object")
    return found
