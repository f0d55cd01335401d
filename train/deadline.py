"""When to stop so that the last step is saved before the time is up, with no signal from anybody.

Nothing here imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_STEPS_AHEAD = 3
"""A request is read one step later, so two more steps run after it; and one for steps that take longer."""
_SPARE_S = 2.0
"""For leaving: the last rows, parting from the other ranks, the interpreter's end."""
_SAVE_FACTOR = 2.0
"""The last save may have to wait for one that has just begun."""


class Deadline:
    """Rank 0's clock. Asked once a step, it learns from that how long steps take."""

    def __init__(self, at_s: float | None, save_s: Callable[[], float] = lambda: 0.0) -> None:
        """
        Args:
            at_s: when the time is up, on this host's monotonic clock; None: never.
            save_s: how long a save takes, as far as is known.
        """
        self.at_s = at_s
        self.save_s = save_s
        self._asked_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=20)

    def needed_s(self) -> float:
        """How much time must be left to finish the steps that will have begun, and to save."""
        return _STEPS_AHEAD * max(self._steps_s, default=0.0) + _SAVE_FACTOR * self.save_s() + _SPARE_S

    def is_due(self, now_s: float) -> bool:
        """Whether to ask for a stop now. Call it once a step.

        Args:
            now_s: this host's monotonic clock.
        """
        if self.at_s is None:
            return False
        if self._asked_s is not None:
            self._steps_s.append(now_s - self._asked_s)
        self._asked_s = now_s
        return now_s + self.needed_s() >= self.at_s
