"""When to stop so that the last step is saved before the time is up, with no signal from anybody.

Nothing here imports torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHECK, EVALUATION, SAVE = "check", "evaluation", "save"
"""What happens between steps. A save is known by `save_s`: most of it is not in its step."""

_STEPS_AHEAD = 3
"""A request is read one step later, so two more steps run after it; and one for steps that take longer."""
_SPARE_S = 2.0
"""For leaving: the last rows, parting from the other ranks, the interpreter's end."""
_SAVE_FACTOR = 2.0
"""The last save may have to wait for one that has just begun."""


class Deadline:
    """Rank 0's clock. Asked once a step, it learns from that how long steps take."""

    def __init__(
        self,
        at_s: float | None,
        save_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            at_s: when the time is up, on this host's monotonic clock; None: never.
            save_s: how long a save takes, as far as is known.
            clock: that clock.
        """
        self.at_s = at_s
        self.save_s = save_s
        self.evaluates_next: Callable[[], bool] = lambda: False
        """Whether an evaluation follows the step that asks: it would begin before the next question."""
        self.waits_to_save_next: Callable[[], bool] = lambda: False
        """Whether that step is to be saved while the save before is still being written."""
        self.steps_an_evaluation = 0.0
        """About how many steps' time an evaluation takes: the guess before the first."""
        self._clock = clock
        self._asked_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=20)
        self._slowest_s: dict[str, float] = {}

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """What happens here between steps is no step's time; the slowest of its kind is remembered for good."""
        began_s = self._clock()
        yield
        took_s = self._clock() - began_s
        self._slowest_s[what] = max(took_s, self._slowest_s.get(what, 0.0))
        if self._asked_s is not None:
            self._asked_s += took_s

    def needed_s(self) -> float:
        """How much time must be left for what will have begun before a request is read, and to save."""
        step_s = max(self._steps_s, default=0.0)
        saves = _SAVE_FACTOR + self.waits_to_save_next()
        needed_s = _STEPS_AHEAD * step_s + saves * self.save_s() + self._slowest_s.get(CHECK, 0.0) + _SPARE_S
        if self.evaluates_next():
            needed_s += self._slowest_s.get(EVALUATION, self.steps_an_evaluation * step_s)
        return needed_s

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
