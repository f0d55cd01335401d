"""What agent 0 writes down while a job runs: `live.json` for who watches, `times.jsonl` for the report.

A row of `times.jsonl` holds all ranks. Rows come each second at first and then ever less often, so that the file of a
week is hardly longer than that of a day.
"""

from __future__ import annotations

from typing import Any

from train.launch.facts import every_s
from train.launch.folder import Folder
from train.launch.supervise import Supervisor
from train.launch.wire import Message
from train.seam import TIMES_FILE, Activity, Phase

_ROWS = 150
"""A row is as far from the one before as a part in so many of all the time yet."""

_SLACK_S = 0.1  # it is asked five times a second


class Chronicle:
    """Keeps what agents told of their ranks last, and writes it down when it is time."""

    def __init__(self, folder: Folder, supervisor: Supervisor, now_s: float) -> None:
        """
        Args:
            folder: the run's.
            supervisor: knows steps and phases.
            now_s: the clock.
        """
        self._folder, self._supervisor = folder, supervisor
        self._facts: dict[int, tuple[int, float, list[int]]] = {}
        self._is_headed = False
        self._began_s = self._row_s = self._live_s = now_s
        self._every_s = every_s(supervisor.terms.plan.world_size)

    def hear(self, node_rank: int, message: Message) -> None:
        """An agent's message may bring facts. Raises LookupError, TypeError or ValueError where they are none."""
        if message.get("start_id", self._supervisor.start_id) != self._supervisor.start_id:
            return
        ranks = self._supervisor.nodes[node_rank].ranks
        for rank, memory_mb, step_ms, times_ms in message.get("facts", ()):
            if rank not in ranks or len(times_ms) > len(Activity):
                raise ValueError(f"facts of rank {rank}")
            self._facts[rank] = int(memory_mb), float(step_ms), [int(time_ms) for time_ms in times_ms]

    def note(self, event: str) -> None:
        """A start is over: what was told last is kept."""
        if event in ("restart", "port taken", "verdict") and self._facts:
            self._add_row()
            self._tell_live(self._live_s)
            self._facts = {}

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if now_s - self._live_s < self._every_s - _SLACK_S or not self._facts:
            return
        self._tell_live(now_s)
        if now_s - self._row_s >= max(self._every_s, (now_s - self._began_s) / _ROWS) - _SLACK_S:
            self._row_s = now_s
            self._add_row()

    def _tell_live(self, now_s: float) -> None:
        supervisor, self._live_s = self._supervisor, now_s
        hosts = [
            [supervisor.name(index), node.is_lost, round(max(0.0, now_s - node.heard_s), 1)]
            for index, node in enumerate(supervisor.nodes)
        ]
        start = {"start_id": supervisor.start_id, "restarts": supervisor.restarts}
        self._folder.tell_live(**start, hosts=hosts, ranks=self._rows())

    def _add_row(self) -> None:
        if not self._is_headed:
            self._is_headed = True
            names = {"activities": [each.words for each in Activity], "phases": [each.words for each in Phase]}
            self._folder.add(TIMES_FILE, **names)
        start = {"start_id": self._supervisor.start_id, "restarts": self._supervisor.restarts}
        self._folder.add(TIMES_FILE, **start, ranks=self._rows())

    def _rows(self) -> list[list[Any]]:
        """Rank, host, step, phase, saved step, exit code, and facts."""
        return [
            [rank, index, view.step, int(view.phase), view.saved_step, view.code, *self._facts[rank]]
            for index, node in enumerate(self._supervisor.nodes)
            for rank, view in node.ranks.items()
            if rank in self._facts
        ]
