"""What befalls a run in a drill: it is killed, asked to stop, or its disk has lied."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from train.errors import CheckpointError
from train.seam import STATUS_PAGE, Exit

_LEAVES_S = 120.0
Agent = subprocess.Popen[bytes]

KILL_RANK, KILL_AGENT, KILL_ALL = "kill -9 of a rank", "kill -9 of the agent", "kill -9 of all"
TERM, DAMAGE = "SIGTERM", "kill -9 of all, newest checkpoint damaged"

ANSWERS: dict[str, tuple[int, ...]] = {
    KILL_RANK: (Exit.RANK_FAILED,),
    KILL_AGENT: (-signal.SIGKILL,),
    KILL_ALL: (-signal.SIGKILL, Exit.RANK_FAILED),  # the agent may see its ranks go first
    TERM: (Exit.STOPPED_SAVED, Exit.STOPPED_UNSAVED, -signal.SIGTERM),  # before it can listen it ends by the signal
    DAMAGE: (-signal.SIGKILL, Exit.RANK_FAILED),
}
"""With which exit status of the agent a fault must end."""


class StillThereError(Exception):
    """Something of a start is left long after its end."""


def befall(kind: str, agent: Agent, run: Path, dice: random.Random) -> str:
    """Do it; what it has come to: another kind where there was nothing to hit, '' where all was over already."""
    return _FAULTS[kind](agent, run, dice)


def end_all(agent: Agent) -> bool:
    """kill -9 of a start's processes; whether the agent was still at work."""
    pids = [*_ranks(agent)]
    if agent.poll() is not None:
        return False
    for pid in [*pids, agent.pid]:
        _kill(pid)
    return True


def until_free(runs: Path) -> None:
    """Wait until nobody holds one of these run folders any more. Raises StillThereError."""
    deadline_s = time.monotonic() + _LEAVES_S
    while any(_is_held(lock) for lock in runs.glob("*/.*lock")):
        if time.monotonic() > deadline_s:
            raise StillThereError(f"something is left of a start that ended {_LEAVES_S:g} s ago")
        time.sleep(0.05)


def _kill_rank(agent: Agent, run: Path, dice: random.Random) -> str:
    ranks = list(_ranks(agent))
    if not ranks:
        return _kill_agent(agent, run, dice)
    return KILL_RANK if _kill(dice.choice(ranks)) else ""


def _kill_agent(agent: Agent, run: Path, dice: random.Random) -> str:
    if agent.poll() is not None:
        return ""
    agent.kill()
    return KILL_AGENT


def _kill_all(agent: Agent, run: Path, dice: random.Random) -> str:
    return KILL_ALL if end_all(agent) else ""


def _terminate(agent: Agent, run: Path, dice: random.Random) -> str:
    if agent.poll() is not None:
        return ""
    agent.terminate()
    return TERM


def _damage(agent: Agent, run: Path, dice: random.Random) -> str:
    """Power fails, and the disk has lied about the newest checkpoint; the one before is good."""
    if not end_all(agent):
        return ""
    agent.wait()
    until_free(run.parent)  # nobody writes there any more
    whole = _whole(run)
    if len(whole) < 2:
        return KILL_ALL
    file, manifest = whole[0] / "state.pt", whole[0] / "manifest.json"
    match dice.choice(["bit", "short", "manifest"]):
        case "bit":
            with file.open("r+b") as content:
                content.seek(dice.randrange(file.stat().st_size))
                byte = content.read(1)
                content.seek(-1, os.SEEK_CUR)
                content.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))
        case "short":
            os.truncate(file, dice.randrange(file.stat().st_size))
        case _:
            manifest.unlink()
    return DAMAGE


def _whole(run: Path) -> list[Path]:
    """The newest checkpoint and the one before, where both are good: one that is damaged already is no target."""
    from train.checkpoint import Checkpoints, verify

    newest = list(Checkpoints(run / "checkpoints", keep=1).saved())[:2]
    try:
        for path in newest:
            verify(path)
    except CheckpointError:
        return []
    return newest


_FAULTS: dict[str, Callable[[Agent, Path, random.Random], str]] = {
    KILL_RANK: _kill_rank, KILL_AGENT: _kill_agent, KILL_ALL: _kill_all, TERM: _terminate, DAMAGE: _damage,
}  # fmt: skip
KINDS = tuple(_FAULTS)


def _ranks(agent: Agent) -> Iterator[int]:
    for child in _children(agent.pid):
        try:
            if STATUS_PAGE in child.environ():
                yield child.pid
        except psutil.Error:
            continue


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill(pid: int) -> bool:
    """Whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
