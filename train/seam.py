"""What the launch plane and the training plane share: exit codes, environment names, a rank's status page.

Standard library only. A node agent gives each rank a status page: one page of memory in a file that both have
mapped. The rank writes there how far it is, the agent what it asks of the rank. Neither ever waits for the other.
Beside the page, files of the same name with other endings carry what does not fit in it (`beside`).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple


class Exit(IntEnum):
    """Exit codes of a rank, and of everything that launches one."""

    FINISHED = 0
    BUG = 1  # Muster's own
    USAGE = 2  # bad config, environment or data: nothing was trained
    PREFLIGHT = 3  # a host is not fit for the job, or the container could not start
    NEVER_JOINED = 4  # a rank or a host did not come
    RANK_FAILED = 5  # an exception, a signal, out of memory, a non-finite loss, replicas that differ
    HANG = 6  # a rank made no progress in time
    HOST_LOST = 7  # a host, or the agent on it, is gone
    STOPPED_UNSAVED = 8  # stopped, and what came after the last checkpoint is lost
    STOPPED_SAVED = 75  # stopped on request with a good checkpoint: run it again to go on


RUN_ID = "MUSTER_RUN_ID"  # the run's name; survives restarts
RUNS_DIR = "MUSTER_RUNS_DIR"  # the folder that holds the run folders
START_ID = "MUSTER_START_ID"  # this start of the run
SECRET_FILE = "MUSTER_SECRET_FILE"  # noqa: S105 - the name of a variable; never passed on to ranks
STATUS_PAGE = "MUSTER_STATUS_PAGE"  # where a rank's status page is; also the mark by which its processes are found
DEADLINE = "MUSTER_DEADLINE_S"  # when the time limit ends, on the host's monotonic clock: a rank of ours saves before
HEARTBEAT_FILE = "MUSTER_HEARTBEAT_FILE"  # an agent touches it each second: for a container's health check

LOG_ONLY = "\x1e"  # a line of output that starts with this goes to the rank's log, not to the console
STOP_FILE = "STOP"  # in a run folder: please stop
TIMES_FILE, LIVE_FILE = "times.jsonl", "live.json"  # in a run folder: where each rank's time went, and how far it is
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # at an agent: please stop


def find_run(name: str, runs_dir: Path) -> Path | None:
    """The folder of a run given by name or by path."""
    for path in (runs_dir / name, Path(name)):
        if path.is_dir() and any((path / file).exists() for file in ("plan.json", "config.yaml", "verdict.json")):
            return path
    return None


class Phase(IntEnum):
    """What a rank is doing; each phase has a time-out of its own."""

    STARTING = 0  # up to the first step: loading, meeting the others, resuming
    FIRST_STEP = 1  # compiling, first batches
    STEP = 2
    EVALUATION = 3
    SAVING = 4
    ENDING = 5  # the last step is done and saved

    @property
    def words(self) -> str:
        """As said to people."""
        return self.name.lower().replace("_", " ")


class Activity(IntEnum):
    """What a rank's time goes into. It is in exactly one at any moment, so all of them add up to its whole life."""

    LOADING = 0  # from the process's start: Python, torch
    JOINING = 1  # until all ranks have met
    PREPARING = 2  # data, model, checkpoint
    FIRST_STEP = 3  # as a whole: it compiles and fills caches
    DATA = 4
    COMPUTING = 5  # forward and backward
    WAITING = 6  # for the other ranks' gradients
    OPTIMIZER = 7
    EVALUATION = 8
    SAVING = 9
    OTHER = 10  # rows of metrics, comparisons of replicas
    ENDING = 11

    @property
    def words(self) -> str:
        """As said to people."""
        return self.name.lower().replace("_", " ")


_ACTIVITY = {
    Phase.STARTING: Activity.LOADING,
    Phase.FIRST_STEP: Activity.FIRST_STEP,
    Phase.STEP: Activity.OTHER,  # until it says more
    Phase.EVALUATION: Activity.EVALUATION,
    Phase.SAVING: Activity.SAVING,
    Phase.ENDING: Activity.ENDING,
}


class Status(NamedTuple):
    """What a rank told last."""

    is_ours: bool
    """False: it never wrote; it is a script that knows nothing of status pages, or has not come so far."""
    step: int
    """Steps done."""
    phase: Phase
    progress_s: float
    """When it last got on, on the host's monotonic clock."""
    budget_s: float
    """How long this phase may take without getting on."""
    saved_step: int
    """Step of the newest good checkpoint; -1: none."""


_MAGIC = 0x4D555354
_TOLD = struct.Struct("=IIQQdqQ")  # magic, phase, step, progress in ns, budget in s, saved step, reserved
_BEAT = struct.Struct("=IQQ")  # phase, step, progress in ns: the part that changes at each step
_FLAG = struct.Struct("=I")
_PHASE_AT, _BUDGET_AT, _SAVED_AT = 4, 24, 32
_STOP_AT, _DUMP_AT = 64, 68
_TIMES_AT = 128
_TIMES = struct.Struct(f"=dd{len(Activity)}d")  # activity now, since when (monotonic clock), seconds in each before
PAGE_BYTES = 4096


class StatusPage:
    """A rank's status page, seen from either side.

    The rank calls `open_as_rank`, `beat`, `enter`, `doing`, `saved` and reads `stop_asked`, `evidence_asked`;
    the agent makes the page, calls `ask_to_stop`, `ask_for_evidence`, `read` and `times_s`.
    """

    def __init__(self, path: Path | None) -> None:
        """Map the page; without a path, one of its own that nobody reads. Raises OSError and ValueError."""
        self.path = path
        if path is None:
            self._map = mmap.mmap(-1, PAGE_BYTES)
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._times = memoryview(self._map)[_TIMES_AT : _TIMES_AT + _TIMES.size].cast("d")
        self._at, self._since_s, self._is_whole = 2, time.monotonic(), False

    @classmethod
    def make(cls, path: Path) -> StatusPage:
        """A new page for a rank that is about to be started. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)  # a page that has no room must fail here, not at a write
        finally:
            os.close(descriptor)
        page = cls(path)
        page.saved(-1)
        return page

    def beside(self, ending: str) -> Path | None:
        """A file that goes with the page: `failure.json`, `run`, `flight.json`. None where nobody would read it."""
        return self.path.with_suffix(f".{ending}") if self.path else None

    # The rank's side.

    def open_as_rank(self, budget_s: float, born_s: float | None = None) -> None:
        """This rank, alive since `born_s`, knows of status pages; it may take `budget_s` until its first step."""
        self._since_s = time.monotonic() if born_s is None else born_s
        _TIMES.pack_into(self._map, _TIMES_AT, Activity.LOADING, self._since_s, *[0.0] * len(Activity))
        _TOLD.pack_into(self._map, 0, _MAGIC, Phase.STARTING, 0, time.monotonic_ns(), budget_s, -1, 0)

    def beat(self, phase: Phase, step: int) -> None:
        """The rank got on: `step` steps are done, and this is what it does now."""
        _BEAT.pack_into(self._map, _PHASE_AT, phase, step, time.monotonic_ns())

    def enter(self, phase: Phase, step: int, budget_s: float) -> None:
        """A beat that also sets how long this phase may take without another, and what time goes into at first."""
        self._is_whole = False
        self.doing(_ACTIVITY[phase])
        self._is_whole = phase is Phase.FIRST_STEP
        struct.pack_into("=d", self._map, _BUDGET_AT, budget_s)
        self.beat(phase, step)

    def doing(self, activity: Activity) -> None:
        """What the rank's time goes into from here on. It is called several times a step, and only stores."""
        if not self._is_whole:
            times, value, now_s = self._times, activity._value_, time.monotonic()
            times[self._at] += now_s - self._since_s
            times[0], times[1] = value, now_s
            self._at, self._since_s = value + 2, now_s

    def saved(self, step: int) -> None:
        """There is a good checkpoint of this step."""
        struct.pack_into("=q", self._map, _SAVED_AT, step)

    @property
    def stop_asked(self) -> bool:
        """Whether the agent asks the rank to stop at a step that all ranks agree on."""
        return self._map[_STOP_AT] != 0

    @property
    def evidence_asked(self) -> bool:
        """Whether the agent asks for the flight record: somebody hangs."""
        return self._map[_DUMP_AT] != 0

    # The agent's side.

    def read(self) -> Status:
        """What the rank told last."""
        told = _TOLD.unpack_from(self._map, 0)
        for _ in range(3):  # the rank may be writing just now
            again = _TOLD.unpack_from(self._map, 0)
            if again == told:
                break
            told = again
        magic, phase, step, progress_ns, budget_s, saved_step, _ = told
        return Status(magic == _MAGIC, step, Phase(phase), progress_ns / 1e9, budget_s, saved_step)

    def times_s(self, now_s: float) -> list[float]:
        """Seconds that went into each `Activity` until then, of the monotonic clock; empty before the rank tells."""
        told = _TIMES.unpack_from(self._map, _TIMES_AT)
        for _ in range(3):  # the rank may be writing just now
            again = _TIMES.unpack_from(self._map, _TIMES_AT)
            if again == told:
                break
            told = again
        doing, since_s, *sums = told
        if not since_s or not 0 <= doing < len(Activity):
            return []
        sums[int(doing)] += max(0.0, now_s - since_s)
        return sums

    def ask_to_stop(self) -> None:
        """Stop, please."""
        _FLAG.pack_into(self._map, _STOP_AT, 1)

    def ask_for_evidence(self) -> None:
        """Write the flight record beside the page, please."""
        _FLAG.pack_into(self._map, _DUMP_AT, 1)

    def close(self) -> None:
        """Let go of it."""
        self._times.release()
        self._map.close()
