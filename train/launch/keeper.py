"""Finds every process of a start, and ends them: also when the agent that started them was killed.

Run as a script it is the keeper: it waits on a pipe whose other end only the agent holds. When the pipe closes
without a farewell, the agent is gone, and the keeper ends all that it left.

A process belongs to a start when one of these is true:
  its environment carries the start's mark (a status page in the folder that this agent made for this start; children
  inherit it, also those with a session of their own); its session is that of a rank; its parent belongs to it.
What cleared its environment, took a session of its own and lost its parent is found only while the agent lives: it
is the agent's child then (PR_SET_CHILD_SUBREAPER, prctl(2)).

Imports nothing but the lightest of the standard library, so that it starts in some 15 ms.
"""

# ruff: noqa: PTH110, PTH208, PTH123 - pathlib would double the time it takes to start

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing itself would be a fifth of the time to start
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

DEADLINE_S = 10.0
_MARK = b"MUSTER_STATUS_PAGE="
_JOB = b"SLURM_JOB_ID="


class Process:
    """What /proc/PID/stat tells (proc(5)): process ids, the state as a letter, and when it began (clock ticks)."""

    __slots__ = ("began", "parent", "pid", "session", "state")

    def __init__(self, pid: int, parent: int, session: int, state: str, began: int) -> None:
        self.pid, self.parent, self.session, self.state, self.began = pid, parent, session, state, began


def processes() -> dict[int, Process]:
    """All that run now, zombies left out."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = look_at(int(name))
            if process is not None and process.state not in "ZX":
                found[process.pid] = process
    return found


def look_at(pid: int) -> Process | None:
    """One process, or None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            told = file.read()
    except OSError:
        return None
    fields = told[told.rindex(b")") + 2 :].split()  # the name may hold blanks and brackets
    state, parent, _, session = fields[:4]
    return Process(pid, int(parent), int(session), state.decode(), int(fields[19]))


def environment_of(pid: int) -> list[bytes]:
    """The environment a process was started with; nothing where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def members(
    folders: Collection[str], sessions: Collection[int], spared: Collection[int] = (), since: int = 0
) -> set[int]:
    """Process ids of all that belong to these starts.

    Args:
        folders: those of their status pages; not the starts' ids, which agents beside this one may share.
        sessions: sessions of the ranks.
        spared: never among them: who asks.
        since: when their agent began. Whatever ran before it cannot be theirs: that stays alive whatever else is
            mistaken here, for what is found will be killed, and perhaps by root.
    """
    marks = tuple(_MARK + os.fsencode(folder) + b"/" for folder in folders)
    here = {pid: process for pid, process in processes().items() if process.began >= since}
    own_job = [entry for entry in environment_of(os.getpid()) if entry.startswith(_JOB)]
    found = set()
    for pid, process in here.items():
        if process.session in sessions:
            found.add(pid)
            continue
        environment = environment_of(pid)
        # A rank may itself have sent a job to Slurm: that one inherits the mark, but is none of ours.
        if any(e.startswith(marks) for e in environment) and own_job == [e for e in environment if e.startswith(_JOB)]:
            found.add(pid)
    return (found | _below(found, here)) - set(spared) - {os.getpid()}


def descendants(ancestor: int) -> set[int]:
    """Process ids of all that came of a process, zombies too. Where that is a subreaper, nothing gets away from it.

    Asks only about those, so that it costs nothing on a host with thousands of others. proc(5) calls these lists
    unreliable: one that leaves them while they are read may hide another. But then it was in them itself.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return _below({ancestor}, processes())
    found: set[int] = set()
    new = [ancestor]
    while new:
        new = [child for parent in new for child in _children(parent) if child not in found]
        found.update(new)
    return found


def _children(parent: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                found += [int(pid) for pid in file.read().split()]
    except OSError:
        pass  # it is gone
    return found


def _below(ancestors: set[int], here: dict[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in here.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    new = list(ancestors)
    while new:
        new = [pid for parent in new for pid in children.get(parent, ()) if pid not in found]
        found.update(new)
    return found


def session_of(leader: int) -> set[int]:
    """Process ids of a session, less its leader."""
    return {pid for pid, process in processes().items() if process.session == leader} - {leader}


def end_all(find: Callable[[], set[int]], deadline_s: float = DEADLINE_S) -> set[int]:
    """Kill what `find` finds until it finds nothing twice in a row; what is left at the deadline."""
    deadline = time.monotonic() + deadline_s
    quiet = 0
    wait_s = 0.001
    left: set[int] = set()
    dying: set[int] = set()
    while quiet < 2 and time.monotonic() < deadline:  # twice: one may have been forked while we looked
        # What was killed may take its time, and be found no more: it has lost its parent.
        dying = {pid for pid in dying if (process := look_at(pid)) is not None and process.state not in "ZX"}
        left = find() | dying
        quiet = 0 if left else quiet + 1
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                dying.add(pid)
            except OSError:
                pass
        if left:
            time.sleep(wait_s)
            wait_s = min(0.1, wait_s * 2)
    return left


def _is_heard(pipe: int, patience_s: float) -> bool:
    """Wait for something on the pipe; False after so many seconds in which this process itself ran. 0: for ever."""
    waited_s = 0.0
    while True:
        if select.select([pipe], [], [], 1.0 if patience_s else None)[0]:
            return True
        waited_s += 1.0  # however long it was: a frozen host's keeper was frozen too
        if waited_s >= patience_s:
            return False


def keep(pipe: int, agent: int, since: int) -> None:
    """Wait for the agent's end; unless it said farewell, end what it left.

    `agent` is its process id, and `since` when it began: a keeper may come late, and find it gone already.

    Lines on the pipe: `start FOLDER` (of its status pages), `session PID`, `over` (all of it has ended), `farewell`;
    `watch SECONDS`: after so long without a line the agent is stopped or stuck, the others have given this host up,
    and what it runs ends too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    running: set[str] = set()
    sessions: set[int] = set()
    folders: set[str] = set()
    patience_s = 0.0
    rest_of_line = b""
    while True:
        if not _is_heard(pipe, patience_s):
            end_all(lambda: members(running, sessions, (agent,), since))
            patience_s = 0.0
            continue
        told = os.read(pipe, 1 << 16)
        if not told:
            break
        *whole, rest_of_line = (rest_of_line + told).split(b"\n")
        for line in whole:
            word, _, rest = os.fsdecode(line).partition(" ")
            if word == "start" and rest.startswith("/"):
                running.add(rest)
                folders.add(rest)
            elif word == "session":
                sessions.add(int(rest))
            elif word == "over":
                running.clear()
                sessions.clear()
            elif word == "watch":
                patience_s = float(rest)
            elif word == "farewell":
                return
    end_all(lambda: members(running, sessions, (agent,), since))
    import shutil  # heavy, and seldom needed

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
