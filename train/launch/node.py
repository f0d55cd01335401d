"""One host's half of the agent: its ranks are started, listened to and ended as agent 0 says."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from train.launch import keeper
from train.launch.afar import slowest, write_heartbeat
from train.launch.clock import LOST_AFTER_S
from train.launch.environment import INTERFACE_VARIABLES, Place, rank_environment
from train.launch.facts import every_s, facts_of
from train.launch.folder import Folder
from train.launch.keeper_pipe import KeeperPipe
from train.launch.output import Console, RankLog, RankOutput, Writer
from train.launch.ranks import Rank, reap, shortened
from train.launch.views import Terms
from train.launch.wire import Message
from train.seam import HEARTBEAT_FILE, Exit

_SHARED_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 4 << 20  # noqa: S108 - a folder of our own is made in it
KILL_AFTER_S = 2.0
FLIGHT_S, STACK_S = 2.0, 1.0


class Node:
    """The ranks of this host, through all starts of the job."""

    def __init__(
        self,
        terms: Terms,
        node_rank: int,
        tell: Callable[[Message], None],
        console: Console,
        keeper_pipe: KeeperPipe,
        run_id: str | None,
        runs_dir: Path,
    ) -> None:
        """
        Args:
            terms: the job.
            node_rank: this host's.
            tell: queues a message to agent 0.
            console: where lines go.
            keeper_pipe: the keeper's.
            run_id: the run's name, where it is known from the start.
            runs_dir: the folder of run folders.
        """
        self.terms, self.node_rank, self._tell_agent_0, self._console, self._keeper = (
            terms, node_rank, tell, console, keeper_pipe,
        )  # fmt: skip
        self._run_id, self._runs_dir = run_id, runs_dir
        self._logs = Writer("logs")
        self.folder = Folder(self._logs, node_rank)
        self.ranks: list[Rank] = []
        self.interface: str | None = None
        self.start_id = ""
        self._aside: Path | None = None
        self._end: asyncio.Task[None] | None = None
        self.starts = 0
        """How often ranks were started."""
        self._at_once = self._aborting = self._stopping = False
        self._paused: list[Rank] = []
        self._beat_s = self._facts_s = 0.0
        self._awake_since_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ours = terms.is_ours
        self._deadline_s = None if terms.time_limit_s is None else time.monotonic() + terms.time_limit_s
        self._heartbeat = Path(os.environ[HEARTBEAT_FILE]) if os.environ.get(HEARTBEAT_FILE) else None

    def _tell(self, message: Message) -> None:
        self._tell_agent_0({"start_id": self.start_id, **message})

    # What agent 0 says.

    def obey(self, message: Message) -> None:
        """Carry out a message of agent 0."""
        match message["kind"]:
            case "start":
                self._start(message)
            case "stop":
                self._ask_to_stop(message["by"])
            case "evidence":
                self._run(self._gather_evidence())
            case "end":
                self._run(self.end(now=message["now"]))

    def _start(self, message: Message) -> None:
        self.start_id, self._end = message["start_id"], None
        self._at_once = self._aborting = self._stopping = False
        self._remove_aside()
        self.folder.forget_verdict(self.start_id)
        self.starts += 1
        plan = self.terms.plan
        place = Place(
            node_rank=self.node_rank,
            nnodes=len(plan.hosts),
            nproc=plan.hosts[self.node_rank].slots,
            first_rank=plan.ranks(self.node_rank)[0],
            world_size=plan.world_size,
            master_addr=plan.master_addr,
            master_port=message["master_port"],
            start_id=self.start_id,
            restart_count=message["restart_count"],
            max_restarts=self.terms.max_restarts,
            run_id=self._run_id,
            runs_dir=str(self._runs_dir),
            interface=self.interface,
            deadline_s=self._deadline_s,
        )
        self.ranks = []
        chosen = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
        if place.interface and chosen:
            said = ", ".join(f"{name}={value}" for name, value in chosen.items())
            self._console.say(f"{said}: taken as set, though the way to the other hosts is by {place.interface}")
        try:
            where = _SHARED_MEMORY if _has_room(_SHARED_MEMORY) else None
            self._aside = Path(tempfile.mkdtemp(prefix=f"muster-{self.start_id}-", dir=where))
            self._keeper.say(f"start {self._aside}", *self._watch())
            for local_rank in range(place.nproc):
                self._start_rank(place, local_rank)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            words = f"cannot start {self.terms.command[0]!r}: {getattr(error, 'strerror', None) or error}"
            self._tell({"kind": "failed", "words": words, "exit_code": int(Exit.USAGE)})
        if self.folder.path is not None:
            self._move_logs()

    def _watch(self) -> list[str]:
        """To the keeper: how long to bear silence. On a single host Ctrl-Z is nobody's business."""
        return [f"watch {LOST_AFTER_S + 4:g}"] if len(self.terms.plan.hosts) > 1 else []

    def _start_rank(self, place: Place, local_rank: int) -> None:
        assert self._aside is not None
        number = place.first_rank + local_rank
        log = RankLog(self._logs, self._aside / f"rank{number}.log", self._console.say)
        prefix = f"{self.name} rank {number} | " if place.nnodes > 1 else f"rank {number} | "
        output = RankOutput(prefix if place.world_size > 1 else "", self._console, log)
        rank = Rank(number, self._aside / f"rank{number}.page", output, is_ours=self._is_ours)
        environment = rank_environment(os.environ, place, local_rank, str(rank.page.path))
        rank.start(self.terms.command, environment)
        self.ranks.append(rank)
        self._keeper.say(f"session {rank.pid}")
        asyncio.get_running_loop().add_reader(rank.pipe, self._listen, rank)

    def _ask_to_stop(self, by: str) -> None:
        self._stopping = True
        for rank in self.ranks:
            rank.page.ask_to_stop()
            # A signal during `import torch` would kill ours: they read their page. Others know only the signal.
            if not self._is_ours and not rank.page.read().is_ours:
                rank.signal_program(signal.SIGTERM)
        if self.ranks:
            self._console.say(
                f"stopping, asked by {by}; {self.terms.grace_s:g} s to save (again: ends at once, unsaved)"
            )

    async def _gather_evidence(self) -> None:
        """Flight records, and of who gives none the stacks of all threads, which cost that rank its life.

        Who gave a record is left alone: its death would reach ranks elsewhere before they have told where they are.
        """
        for rank in self.ranks:
            rank.page.ask_for_evidence()
        await _until(lambda: all(r.code is not None or r.has_flight_record() for r in self._own()), FLIGHT_S)
        told = {rank.rank: rank.evidence()["state"] for rank in self.ranks}
        self._aborting = True
        mute = [rank for rank in self.ranks if not rank.has_flight_record()]
        for rank in mute:
            rank.output.is_shown = False  # the stacks of all its threads: for the log
            rank.signal_program(signal.SIGABRT)
        await _until(lambda: all(r.code is not None or told[r.rank] == "T" for r in mute), STACK_S)
        for rank in self.ranks:
            if rank.pipe >= 0:
                rank.read(most_bytes=1 << 20)
            found = {**rank.evidence(), "state": told[rank.rank]}
            self.folder.write(f"evidence/{self.start_id}-rank{rank.rank}.json", found)
            self._tell({"kind": "evidence", "ranks": {rank.rank: shortened(found)}})  # one by one: messages are limited

    def _own(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.page.read().is_ours]

    async def end(self, *, now: bool = False) -> None:
        """End everything of this start on this host, then say so. SIGTERM first, unless `now`."""
        self._at_once = self._at_once or now
        if self._end is None:
            self._end = asyncio.create_task(self._end_all())
        await asyncio.shield(self._end)  # who asks a second time must not leave before it is done

    async def _end_all(self) -> None:
        ranks, start_id = self.ranks, self.start_id
        if not self._at_once and any(rank.code is None for rank in ranks):
            for rank in ranks:
                rank.kill(signal.SIGTERM)
            await _until(lambda: self._at_once or all(rank.code is not None for rank in ranks), KILL_AFTER_S)
        for rank in ranks:
            rank.kill(signal.SIGKILL)
        left = await asyncio.to_thread(keeper.end_all, lambda: keeper.descendants(os.getpid()) - {self._keeper.pid})
        for rank in ranks:
            if rank.code is not None:
                self._report(rank)  # who waited for its session does not any more
            if rank.pipe >= 0:
                rank.read(most_bytes=1 << 20)
                asyncio.get_running_loop().remove_reader(rank.pipe)
                rank.close()
            rank.output.log.close()
        if left:
            self._console.say(f"cannot end process {', '.join(map(str, sorted(left)))}: it does not die (state D?)")
        self._keeper.say("over")
        if self.folder.path is not None:
            self._remove_aside()
        self._tell({"kind": "ended", "start_id": start_id, "left": sorted(left)})

    def _remove_aside(self) -> None:
        """Pages, and logs that no run folder was found for; after what is queued for them."""
        if self._aside is not None:
            self._logs.put(0, partial(shutil.rmtree, self._aside, ignore_errors=True))
            self._aside = None

    def _run(self, what: Any) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(tell_of_error)

    # What happens here.

    def _listen(self, rank: Rank) -> None:
        if self._logs.is_full:  # let the rank wait for its log, as it would for a file of its own
            asyncio.get_running_loop().remove_reader(rank.pipe)
            self._paused.append(rank)
        elif not rank.read():
            asyncio.get_running_loop().remove_reader(rank.pipe)
            rank.close()

    def children_ended(self) -> None:
        """SIGCHLD came."""
        by_pid = {rank.pid: rank for rank in self.ranks}
        for pid, code in reap():
            if pid == self._keeper.pid:
                sessions = [f"session {rank.pid}" for rank in self.ranks if rank.code is None]
                known = [f"start {self._aside}", *self._watch(), *sessions] if self._aside is not None else []
                if not self._keeper.start(*known):
                    self._console.say("the keeper ends again and again: after a kill -9 of this agent, ranks may stay")
            elif pid in by_pid:
                rank = by_pid[pid]
                rank.ended(code)
                if rank.is_shell and self._stopping and self._end is None and keeper.session_of(rank.pid):
                    self._run(self._wait_for_session(rank))
                else:
                    self._report(rank)

    async def _wait_for_session(self, rank: Rank) -> None:
        """The shell around a script has ended on the stop request, but not yet the script: it may be saving."""
        while self._end is None and keeper.session_of(rank.pid):
            await asyncio.sleep(0.1)
        self._report(rank)

    def _report(self, rank: Rank) -> None:
        if rank.is_reported:
            return
        rank.is_reported = True
        if rank.pipe >= 0:
            rank.read(most_bytes=1 << 20)  # its last words, before it is judged
            rank.output.finish()
        gpus = Path("/dev/nvidia0").exists()
        report = rank.end_report(gpu=self.ranks.index(rank) if gpus else None)
        self._tell({**report, "by_us": self._end is not None or self._aborting, "facts": [facts_of(rank)]})

    def tick(self, now_s: float, awake_since_s: float) -> None:
        """Time has passed: look after the run folder, and each second tell how far the ranks are."""
        self._awake_since_s = awake_since_s
        if self.folder.path is None:
            self.look_for_folder()
        if self._paused and not self._logs.is_full:
            for rank in self._paused:
                if rank.pipe >= 0:
                    asyncio.get_running_loop().add_reader(rank.pipe, self._listen, rank)
            self._paused = []
        if now_s - self._beat_s < 1.0:
            return
        self._beat_s = now_s
        self._keeper.say("beat")
        rows = []
        for rank in self.ranks:
            status, over_s = rank.status(awake_since_s)
            rows.append([rank.rank, status.is_ours, status.step, status.phase, status.saved_step, over_s])
        self.tell_afar(slowest(rows))
        now_s = time.monotonic()
        quiet_s = min((now_s - max(rank.output.heard_s, awake_since_s) for rank in self.ranks), default=0.0)
        facts: list[list[Any]] = []
        if now_s - self._facts_s > every_s(self.terms.plan.world_size) - 0.5:
            self._facts_s, facts = now_s, [facts_of(rank) for rank in self.ranks if rank.code is None]
        self._tell({"kind": "beat", "ranks": rows, "quiet_s": round(quiet_s, 1), "facts": facts})
        if self.folder.take_stop_file():
            self._tell({"kind": "stop", "by": "the STOP file", "now": False})

    def tell_afar(self, progress: Mapping[str, Any]) -> None:
        """A heartbeat, with the step and phase where they are known."""
        if self._heartbeat is not None:
            write_heartbeat(self._heartbeat, self.folder.path, self.start_id, progress)

    # The run folder.

    @property
    def name(self) -> str:
        """This host's name, as people know it."""
        return self.terms.name_of(self.node_rank) or socket.gethostname()

    def look_for_folder(self) -> None:
        """Whether a rank of ours has told by now where the run folder is."""
        for rank in self.ranks:
            path = rank.run_folder()
            if path is not None:
                self.folder_is(path)
                return

    def folder_is(self, path: Path) -> None:
        """This is the run folder: logs go there."""
        self.folder.is_at(path, self.start_id)
        self._run_id = path.name  # also after a restart
        if self.node_rank == 0:
            self.folder.write("plan.json", {**self.terms.plan.as_dict(), "command": list(self.terms.command)})
        self._move_logs()

    def _move_logs(self) -> None:
        assert self.folder.path is not None
        for rank in self.ranks:
            rank.output.log.move(
                self.folder.path / "logs" / f"node{self.node_rank}-{self.name}" / f"rank{rank.rank}.log"
            )

    def close(self) -> None:
        """Nothing is left to do: let the log be written to its end."""
        self._remove_aside()
        self._logs.close(5.0)


def tell_of_error(task: asyncio.Task[Any]) -> None:
    """A task that nobody waits for: its error is told as one of a callback, and so ends the job."""
    if not task.cancelled() and task.exception() is not None:
        words = {"message": "error in a task", "exception": task.exception(), "handle": task}
        asyncio.get_running_loop().call_exception_handler(words)


def _has_room(folder: Path) -> bool:
    """Whether pages, and logs until their folder is known, fit there: leftovers of other programs may fill it."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and found.f_bavail * found.f_frsize > _ROOM_BYTES


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
