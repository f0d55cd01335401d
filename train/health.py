"""A rank's word to its node agent: how far it is, where it stands when somebody hangs, why it failed.

The agent gives each rank a status page (`train/seam.py`). Without an agent the page is a private one that nobody
reads, and no file is written: the same code runs. Nothing here imports torch, so that the page is open before
torch's seconds of loading.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from train.config import RuntimeConfig
from train.errors import UsageError
from train.seam import STATUS_PAGE, Phase, StatusPage

ENTRIES_A_GROUP = 20
_MOST_BYTES = 48_000
_MOST_FRAMES = 60
_POLL_S = 0.25


class Health:
    """One rank's status page, and the files beside it."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the page that an agent made; without a path a private one. Raises OSError and ValueError."""
        self._page = StatusPage(path)
        self._page.saved(-1)
        self._config = RuntimeConfig()
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
        self._page.open_as_rank(config.budget_s(Phase.STARTING))

    def beat(self, step: int) -> None:
        """It got on: `step` steps are done. Once a step or batch: this must cost nothing."""
        self._page.beat(self.phase, step)

    def enter(self, phase: Phase, step: int) -> None:
        """From here on this phase's time-out counts."""
        self.phase = phase
        self._page.enter(phase, step, self._config.budget_s(phase))

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
        self._write("run", f"{path.absolute()}\n")

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
        stand = {"time_s": time.time(), "step": told.step, "phase": told.phase.words, "stack": main_stack()}
        self._write("flight.json", fit_groups(stand, flight_groups()))


def main_stack() -> list[str]:
    """Where the main thread is: `file:line function`, innermost last."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def flight_groups() -> list[dict[str, Any]]:
    """The newest collectives of each process group, from torch's Flight Recorder; none before torch is there."""
    # Looked up, not imported: the main thread may hang inside an import, and hold its lock.
    recorder = sys.modules.get("torch._C._distributed_c10d")
    if recorder is None or not hasattr(recorder, "_dump_fr_trace_json"):
        return []
    now_ns = time.time_ns()
    groups: dict[str, dict[str, Any]] = {}
    for entry in json.loads(recorder._dump_fr_trace_json()).get("entries", ()):
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        group = groups.setdefault(name, {"name": name, "description": description, "last": 0, "entries": []})
        group["last"] = max(group["last"], entry["collective_seq_id"])
        group["entries"].append(
            {
                "seq": entry["collective_seq_id"],
                "op": entry["profiling_name"],
                "sizes": entry["input_sizes"][:4],
                "retired": entry["retired"],
                "age_s": round((now_ns - entry["time_created_ns"]) / 1e9, 3),
            }
        )
    return list(groups.values())


def fit_groups(stand: Mapping[str, Any], groups: list[dict[str, Any]]) -> str:
    """As JSON that fits in a message: the newest entries of each group, fewer where they are large."""
    keep = ENTRIES_A_GROUP
    while True:
        fewer = [{**group, "entries": group["entries"][-keep:]} for group in groups]
        text = json.dumps({**stand, "groups": fewer}) + "\n"
        if len(text) < _MOST_BYTES or not groups:
            return text
        keep, groups = max(1, keep // 2), groups if keep > 1 else groups[:-1]
