"""Agent 0's ear: whatever an agent that knows the secret sends, the job ends in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.supervised import Job
from train.launch.chronicle import Chronicle
from train.launch.folder import Folder
from train.launch.lead import Leader

ENDED = {"kind": "rank_ended", "rank": 1, "code": 1, "step": None, "oom": False, "lines": [], "by_us": False}
BEAT = {"kind": "beat", "ranks": [], "quiet_s": 0.0}


class Peer:
    """A connection by which one message comes, then the end."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._messages = [message]
        self.is_aborted = False

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            raise EOFError
        return self._messages.pop()

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    "message",
    [
        {**ENDED, "told": {"kind": "exception", "exit_code": 5, "words": 7}},
        {**ENDED, "told": "exception"},
        {**ENDED, "told": None, "rank": 5},
        {**ENDED, "told": None, "lines": [None]},
        {"kind": "evidence", "ranks": [1]},
        {"kind": "failed", "words": "x", "exit_code": 99},
        {"kind": "beat", "ranks": [[1]], "quiet_s": 0.0},
        {"kind": "beat"},
        {**BEAT, "facts": [[1, 300, 2.5, ["long"]]]},
        {**BEAT, "facts": [[0, 300, 2.5, [7]]]},
        {**BEAT, "facts": [[1, 300, 2.5]]},
        {**BEAT, "facts": [[1, 300, 2.5, [7] * 99]]},
        {**BEAT, "facts": 7},
        {},
    ],
)
def test_a_message_that_cannot_be_understood_costs_that_host_alone(message: dict[str, Any]) -> None:
    job, peer = Job(), Peer(message)
    leader: Any = Leader.__new__(Leader)
    leader.supervisor, leader._wires, leader._is_due = job.supervisor, {1: peer}, True
    leader._chronicle = Chronicle(cast(Folder, None), job.supervisor, job.now_s)
    leader.clock = SimpleNamespace(now=lambda: job.now_s)
    asyncio.run(leader._hear(1, peer))
    assert peer.is_aborted
    (lost,) = job.recorded("host lost")
    assert lost["host"] == "node1"
    assert lost["why"].startswith("its agent sent what cannot be understood (")
    assert job.until_verdict().exit_code == 7
