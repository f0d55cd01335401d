"""Requests to stop: by signal, by a node agent through the status page, or because the time is nearly up."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from train.deadline import Deadline
from train.health import Health
from train.progress import log


class StopRequest:
    """Asked to stop: SIGTERM, SIGUSR2 or Ctrl-C once, or by the node agent.

    Ctrl-C or SIGTERM again, a second later, ends at once. An agent's request may have come long before the first step.
    """

    def __init__(self, health: Health, deadline: Deadline | None = None) -> None:
        self._health = health
        self.deadline = deadline or Deadline(None)
        self._since: float | None = None
        self._quietly = True
        self._is_told = False

    def listen(self, *, quietly: bool) -> None:
        """From here on signals are requests. Before, while ranks still meet, they end the process as usual."""
        self._quietly = quietly
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        """Whether somebody asked, or the time is nearly up. Once a step."""
        is_due = self.deadline.is_due(time.monotonic())
        if is_due and not self._is_told:
            self._is_told = True
            log.info(f"stopping: {self.deadline.needed_s():.1f} s are needed to save before the time limit")
        return self._since is not None or self._health.stop_asked or is_due

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A terminal sends Ctrl-C to the launcher and the ranks, and the launcher passes it on: that is one request.
        if number != signal.SIGUSR2 and self._since is not None and now - self._since > 1.0:
            raise KeyboardInterrupt
        if self._since is None and not self._quietly:  # not by a logger: its lock may be held where the signal came
            os.write(2, b"stopping after this step, then saving (Ctrl-C again ends at once, unsaved)\n")
        self._since = self._since or now
