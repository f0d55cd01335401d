"""One rank as its agent sees it: started, listened to, asked, ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.launch import memory
from train.launch.output import RankOutput
from train.seam import Exit, Phase, Status, StatusPage

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
SLOW_STEPS = 10
"""A step may take so many times the median of the last ones, where that is more than its time-out."""
_SILENT_START_S = 600.0
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "busybox")


def become_subreaper() -> None:
    """From here on what loses its parent among our descendants becomes our child, so that we find it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Rank:
    """A rank's process, its status page and its output."""

    def __init__(self, rank: int, page_file: Path, output: RankOutput, *, is_ours: bool) -> None:
        """
        Args:
            rank: its global rank.
            page_file: where its status page is to be.
            output: takes what it writes.
            is_ours: the command is `train run`, so that it must open its page some time.
        """
        self.rank = rank
        self.page = StatusPage.make(page_file)
        self.output = output
        self.pid = 0
        self.pipe = -1
        self.is_reported = False
        """Whether agent 0 was told of its end."""
        self.code: int | None = None
        """Its exit code; minus the number of the signal that killed it. None while it lives."""
        self._is_ours = is_ours
        self._born_s = time.monotonic()
        self._counters: list[Path] = []
        self._kills = 0
        self.is_shell = False
        self._steps: deque[float] = deque(maxlen=64)
        self._seen = (0, 0.0)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, in a session of its own. Raises OSError.

        Must be called from the agent's main thread: a parent-death signal comes when the *thread* ends that
        started the process (prctl(2), PR_SET_PDEATHSIG).
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        agent = os.getpid()

        def tie_to_the_agent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != agent:  # it was killed before the line above
                os._exit(Exit.HOST_LOST)

        try:
            started = subprocess.Popen(  # noqa: S603 - an argument list
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=tie_to_the_agent,  # noqa: PLW1509 - it makes system calls only, and takes no lock
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        started.returncode = 0  # reaped by the agent, not by subprocess
        self.pid, self.pipe = started.pid, reading
        self.is_shell = Path(command[0]).name in _SHELLS
        self._counters = memory.counters(self.pid)
        self._kills = memory.kills(self._counters)
        self._born_s = time.monotonic()

    def read(self, *, most_bytes: int = 1 << 16) -> bool:
        """Take what it wrote, without waiting; False at the end of its output.

        No more than so much: one that never stops writing must not keep the agent from all else.
        """
        for _ in range(most_bytes >> 16):
            try:
                data = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.output.feed(data)
            if len(data) < 1 << 16:
                break
        return True

    def close(self) -> None:
        """Its output is at an end, or is given up."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
            self.output.finish()

    def kill(self, number: int) -> None:
        """Send a signal to its process group."""
        if self.pid and self.code is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)

    def signal_program(self, number: int) -> None:
        """Send a signal to the program: not to its data workers, which would die of it while it saves."""
        if self.pid and self.code is None:
            for pid in programs(self.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def ended(self, code: int) -> None:
        """It has ended, with this exit code or minus the signal. A shell tells its program's signal as 128 and more."""
        told_by_shell = self.is_shell and 128 < code <= 128 + signal.SIGRTMAX
        self.code = 128 - code if told_by_shell else code

    def status(self, awake_since_s: float) -> tuple[Status, float]:
        """What it told last, and by how many seconds it is overdue.

        Args:
            awake_since_s: what happened before does not count: this agent, and so this host, did not run.
        """
        status = self.page.read()
        now_s = time.monotonic()
        if not status.is_ours:
            over_s = now_s - max(self._born_s, awake_since_s) - _SILENT_START_S
            return status, over_s if self._is_ours and self.code is None else -1.0
        step, at_s = self._seen
        if status.step > step:
            if at_s and status.phase is Phase.STEP:
                self._steps.append((status.progress_s - at_s) / (status.step - step))
            self._seen = (status.step, status.progress_s)
        allowed_s = status.budget_s
        if status.phase is Phase.STEP and self._steps:
            allowed_s = max(allowed_s, SLOW_STEPS * sorted(self._steps)[len(self._steps) // 2])
        return status, now_s - max(status.progress_s, awake_since_s) - allowed_s

    @property
    def step_s(self) -> float:
        """How long its last steps took on average, each; 0 before there were two."""
        return self._steps[-1] if self._steps else 0.0

    def end_report(self, *, gpu: int | None) -> dict[str, Any]:
        """How it ended, for agent 0."""
        assert self.code is not None
        status = self.page.read()
        told = self._beside("failure.json")
        return {
            "kind": "rank_ended",
            "rank": self.rank,
            "code": self.code,
            "is_ours": status.is_ours,
            "step": status.step if status.is_ours and status.step else None,
            "saved_step": status.saved_step,
            "oom": memory.kills(self._counters) > self._kills,
            "told": told if isinstance(told, dict) and {"kind", "exit_code", "words"} <= told.keys() else None,
            "lines": list(self.output.last),
            "gpu": gpu,
        }

    def evidence(self) -> dict[str, Any]:
        """What can be told of a rank that hangs."""
        return {
            "state": _state_of(programs(self.pid)) if self.code is None else None,
            "stack": self.output.stack[:100],
            "flight": self._beside("flight.json"),
        }

    def has_flight_record(self) -> bool:
        """Whether it has answered the wish for one."""
        path = self.page.beside("flight.json")
        return path is not None and path.exists()

    def run_folder(self) -> Path | None:
        """The run folder that it told."""
        path = self.page.beside("run")
        try:
            return Path(path.read_text(encoding="utf-8")) if path else None
        except OSError:
            return None

    def _beside(self, ending: str) -> Any:
        path = self.page.beside(ending)
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path else None
        except (OSError, ValueError):
            return None


def shortened(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """What agent 0 needs of a rank's evidence, so that that of many ranks fits in one message."""
    stack = list(evidence["stack"])
    current = next((at for at, line in enumerate(stack) if line.startswith("Current thread")), 0)
    flight = evidence["flight"] if isinstance(evidence["flight"], dict) else {}
    groups = [{**group, "entries": group["entries"][-6:]} for group in flight.get("groups", ())[:8]]
    return {
        **evidence,
        "stack": [line[:200] for line in stack[current : current + 30]],
        "flight": {"at": flight.get("at"), "stack": flight.get("stack", [])[-12:], "groups": groups},
    }


def _state_of(pids: Sequence[int]) -> str | None:
    """`R`, `S`, `D`, `T` … as in proc(5); of several the one that is stopped, if one is."""
    states = []
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            states.append(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0])
    return "T" if "T" in states else next(iter(states), None)


def programs(pid: int) -> list[int]:
    """The process; of a shell what it runs: the shell would die of a signal, and hide how the program ended."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        caught = int(Path(f"/proc/{pid}/status").read_text(errors="replace").split("SigCgt:")[1].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return [pid]
    if name not in _SHELLS or not children or caught >> (signal.SIGTERM - 1) & 1:
        return [pid]
    return [program for child in children for program in programs(int(child))]


def reap() -> list[tuple[int, int]]:
    """(process id, exit code or minus the signal) of all children that ended, adopted ones too."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))
