"""The agents' clock, and how long a silence they bear."""

from __future__ import annotations

import time

LOST_AFTER_S = 8.0
"""So long without a word, and a host is lost. All its neighbours are gone 3 s later: 15 s at most are promised."""


class AwakeClock:
    """A clock that stands still while this process does not run: frozen, suspended, or starved of its processor."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._awake_s = 0.0
        self.awake_since_s = self._last_s
        """Since when, on the host's monotonic clock, it has run without a break."""
        self.slept_s = 0.0
        """How long it did not run, where that was so long that the others must have given this host up."""

    def now(self) -> float:
        """Seconds awake."""
        return self._awake_s + min(time.monotonic() - self._last_s, 1.0)

    def tick(self) -> float:
        """Call it several times a second; seconds awake."""
        now_s = time.monotonic()
        gone_s, self._last_s = now_s - self._last_s, now_s
        self._awake_s += min(gone_s, 1.0)
        if gone_s > 2.0:
            self.awake_since_s = now_s
        if gone_s > LOST_AFTER_S:
            self.slept_s = gone_s
        return self._awake_s
