"""A rank's word to its node agent: how far it is, where it stands when somebody hangs, why it failed.

The agent gives each rank a status page (`train/seam.py`). Without an agent the page is a private one that nobody
reads, and no file is written: the same code runs. Nothing here imports torch, so that the page is open before
torch's seconds of loading.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from train import evidence
from train.config import RuntimeConfig
from train.errors import UsageError
from train.seam import STATUS_PAGE, Phase, StatusPage

_POLL_S = 0.25


class Health:
    """One rank's status page, and the files beside it."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the page that an agent made; without a path a private one. Raises OSError and ValueError."""
        self._page = StatusPage(path)
        self._page.saved(-1)
        self._config = RuntimeConfig()
        self.doing = self._page.doing
        """What this rank's time goes into from here on."""
        self.has_agent = path is not None
        """Whether an agent watches: then it judges hangs, keeps the log and writes the verdict."""
        self.phase = Phase.STARTING
        """What this rank is doing: which time-out counts."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Health:
        """The page that the agent named, watched from now on for its question. Raises UsageError."""
        name = env.get(STATUS_PAGE)
        if not name:
            return cls()
        try:
            health = cls(Path(name))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{STATUS_PAGE}={name} is no status page of a node agent ({error}): "
                f"unset {STATUS_PAGE} where no agent starts this rank"
            ) from None
        threading.Thread(target=health._answer, name="evidence", daemon=True).start()
        return health

    def start(self, config: RuntimeConfig) -> None:
        """From here on this rank tells how far it is; `config` has its time-outs."""
        self._config = config
        self._page.open_as_rank(config.budget_s(Phase.STARTING), _born_s())

    def beat(self, step: int) -> None:
        """It got on: `step` steps are done. Once a step or batch: this must cost nothing."""
        self._page.beat(self.phase, step)

    def enter(self, phase: Phase, step: int) -> None:
        """From here on this phase's time-out counts."""
        self.phase = phase
        self._page.enter(phase, step, self._config.budget_s(phase))

    def times_s(self) -> list[float]:
        """Seconds in each `Activity` until now."""
        return self._page.times_s(time.monotonic())

    def saved(self, step: int) -> None:
        """There is a good checkpoint of that step."""
        self._page.saved(step)

    @property
    def stop_asked(self) -> bool:
        """Whether the agent asks to stop, be it from before this rank could listen."""
        return self._page.stop_asked

    @property
    def step(self) -> int:
        """Steps done, as told last."""
        return self._page.read().step

    def tell_run_folder(self, path: Path) -> None:
        """Where the run folder is: the agent moves this rank's log there."""
        self._write("run", str(path.absolute()))

    def tell_failure(self, kind: str, exit_code: int, words: str) -> None:
        """Why this rank ends, before it does; `train/failure.py` has the kinds."""
        failure = {"kind": kind, "exit_code": int(exit_code), "words": words, "step": self.step}
        self._write("failure.json", json.dumps(failure) + "\n")

    def _write(self, ending: str, text: str) -> None:
        """A file beside the page, whole or not there; one that cannot be written is missed, not fatal."""
        path = self._page.beside(ending)
        if path is None:
            return
        aside = path.with_name(f"{path.name}.tmp")
        try:
            aside.write_text(text, encoding="utf-8", errors="replace")
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)

    def _answer(self) -> None:
        """In a thread of its own: when the agent asks, say where this rank stands, also while it waits for others."""
        while not self._page.evidence_asked:
            time.sleep(_POLL_S)
        told = self._page.read()
        stack, at = evidence.main_stack()
        stand = {"time_s": time.time(), "step": told.step, "phase": told.phase.words, "at": at, "stack": stack}
        try:
            groups = evidence.flight_groups()
        except (LookupError, TypeError, ValueError, RuntimeError) as error:  # of another torch: the stack is still good
            stand["no_flight_record"] = repr(error)
            groups = []
        self._write("flight.json", evidence.fit(stand, groups))


def _born_s() -> float:
    """When this process was started, on the monotonic clock (proc(5): field 22 of stat, in ticks since the boot)."""
    now_s = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now_s
    return now_s - age_s if 0 <= age_s <= now_s else now_s
