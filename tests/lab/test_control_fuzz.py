"""Who can reach the control port but does not know the secret can neither end a job nor fill its disk or memory."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

from tests.swarm import Swarm, rss_mb, wait_until
from train.launch import wire
from train.launch.wire import NONCE_BYTES

pytestmark = pytest.mark.slow

BOMBARDED_S = 12.0
IDLE = 300


class Attacker:
    """Opens connections to a control port, and sends what it likes."""

    def __init__(self, address: str, port: int) -> None:
        self.target = (address, port)
        self.idle: list[socket.socket] = []
        self.knocks = 0
        self._chance = random.Random(7)
        self._recorded = b""

    def dial(self) -> socket.socket | None:
        try:
            return socket.create_connection(self.target, timeout=5)
        except OSError:  # sent away before we were through
            return None

    def knock(self, data: bytes) -> None:
        """Send it and look what happens."""
        self.knocks += 1
        call = self.dial()
        if call is None:
            return
        with call:
            call.settimeout(0.2)
            try:
                call.sendall(data)
                call.recv(100)
            except OSError:
                pass

    def idle_connections(self) -> None:
        """Keep so many open that never say a whole greeting, and send each a byte now and then."""
        self.idle = [call for call in self.idle if self._trickle(call)]
        while len(self.idle) < IDLE:
            call = self.dial()
            if call is None:
                return
            self.idle.append(call)

    def _trickle(self, call: socket.socket) -> bool:
        try:
            call.send(b"x")
        except OSError:
            call.close()
            return False
        return True

    def with_another_secret(self) -> bytes:
        """A greeting that is right but for the secret."""
        call = self.dial()
        if call is None:
            return b""
        with call:
            call.settimeout(2)
            try:
                hello = call.recv(8 + NONCE_BYTES, socket.MSG_WAITALL)
                key = wire._session_key(b"not the secret of this job", hello[8:], bytes(NONCE_BYTES))
                text = b'{"node_rank": 1, "nnodes": 2, "nproc": 1, "host": "evil"}'
                said = bytes(NONCE_BYTES) + wire._framed(key, b"greeting", 0, text)
                call.sendall(said)
                assert call.recv(100) == b""
            except OSError:
                return b""
            return said

    def everything(self) -> None:
        """One of each kind."""
        noise = self._chance.randbytes(self._chance.randrange(0, 5000))
        self.knock(noise)
        self.knock(bytes(NONCE_BYTES) + (2**32 - 1).to_bytes(4, "big") + noise)
        self.knock(bytes(NONCE_BYTES) + (4000).to_bytes(4, "big") + noise)
        self.knock(b"[" * 100_000)
        self.knock(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        self._recorded = self.with_another_secret() or self._recorded
        self.knock(self._recorded)

    def close(self) -> None:
        for call in self.idle:
            call.close()


def test_a_job_under_fire_ends_well(tmp_path: Path) -> None:
    """Fire opens before the second agent calls, and lasts until the job has ended by itself."""
    with Swarm(tmp_path, 2, command=("/bin/sleep", str(BOMBARDED_S)), start=[0]) as swarm:
        attacker = Attacker(swarm.address, swarm.control_port)
        attacker.idle_connections()
        for _ in range(5):
            attacker.everything()
        swarm.start(1)
        while "host host1 is here" not in swarm.said(0):
            assert swarm.agents[1].poll() is None, swarm.said(1)
            attacker.idle_connections()
        wait_until(lambda: any(row["event"] == "start" for row in swarm.events()), 30)
        before_mb, most_mb = rss_mb(swarm.agents[0].pid), 0.0
        while swarm.agents[0].poll() is None:
            attacker.idle_connections()
            attacker.everything()
            if swarm.agents[0].poll() is None and not swarm.said(0).endswith("finished\n"):
                most_mb = max(most_mb, rss_mb(swarm.agents[0].pid))
        attacker.close()
        swarm.wait_for_end(30)
        assert [agent.returncode for agent in swarm.agents] == [0, 0], swarm.said(0)
        assert attacker.knocks > 60
        assert most_mb - before_mb < 15
        assert "Traceback" not in swarm.said(0) + swarm.said(1)
        rows = swarm.events()
        strangers = [row for row in rows if row["event"] == "stranger"]
        assert 20 <= len(strangers) <= 26, len(strangers)  # the first twenty, then each power of ten
        assert {row["address"] for row in strangers} == {swarm.address}
        assert (swarm.run / "events.jsonl").stat().st_size < 20_000
        of_hosts = [row["event"] for row in rows if row["event"] in ("joined", "left", "host lost", "failure")]
        assert of_hosts == ["joined", "joined"]


def test_what_was_recorded_of_one_job_does_nothing_in_the_next(tmp_path: Path) -> None:
    """All that agent 1 sent, played to another job with the same secret and ports."""
    said = b""
    with Swarm(tmp_path, 2, command=("/bin/sleep", "4")) as swarm:
        swarm.wait_for_ranks(60)
        swarm.wait_for_end(30)
        port = swarm.control_port
    attacker_said = bytearray()
    listener = socket.create_server((swarm.address, 0))
    folder = tmp_path / "second"
    folder.mkdir()
    with listener, Swarm(folder, 2, command=("/bin/sleep", "6"), control_port=port, start=[0]) as again:
        # Agent 1 calls us, and we pass on what it says: so its whole conversation is known.
        again.start(1, control_port=listener.getsockname()[1])
        caller, _ = listener.accept()
        with caller, socket.create_connection((again.address, port)) as there:
            caller.settimeout(0.1)
            there.settimeout(0.1)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                for source, target in ((caller, there), (there, caller)):
                    try:
                        data = source.recv(1 << 16)
                    except TimeoutError:
                        continue
                    target.sendall(data)
                    if source is caller:
                        attacker_said += data
            said = bytes(attacker_said)
            assert b'"beat"' in said
            attacker = Attacker(again.address, port)
            for _ in range(5):
                attacker.knock(said)
            while again.agents[0].poll() is None and time.monotonic() < deadline + 20:
                for source, target in ((caller, there), (there, caller)):
                    try:
                        data = source.recv(1 << 16)
                        target.sendall(data)
                    except OSError:
                        continue
        again.wait_for_end(30)
        assert [agent.returncode for agent in again.agents] == [0, 0], again.said(0) + again.said(1)
        whys = [row["why"] for row in again.events() if row["event"] == "stranger"]
        assert whys == ["the secret is another one"] * 5
