"""What switches and commits of a run take, measured while it goes."""

from __future__ import annotations

import statistics
from collections import deque

from opengyre.cells.step import OpenStep

_KEPT = 20  # the latest: what was true of a smaller model's context or another load fades


class Measured:
    """Medians in seconds on the run's clock; None until there was one."""

    def __init__(self) -> None:
        self.switches = 0
        self._switch_s: deque[float] = deque(maxlen=_KEPT)
        self._commit_s: deque[float] = deque(maxlen=_KEPT)
        self._complete_at: float | None = None

    @property
    def switch_cost_s(self) -> float | None:
        """One switch."""
        return statistics.median(self._switch_s) if self._switch_s else None

    @property
    def commit_s(self) -> float | None:
        """From the last counted micro-step of a step until the next one is open."""
        return statistics.median(self._commit_s) if self._commit_s else None

    def switched(self, seconds: float) -> None:
        """A switch is done."""
        self.switches += 1
        self._switch_s.append(seconds)

    def see(self, step: OpenStep | None, now: float) -> None:
        """Note when a step is complete; called whenever something changed."""
        if step is not None and step.complete and self._complete_at is None:
            self._complete_at = now

    def opened(self, now: float) -> None:
        """A step is open."""
        if self._complete_at is not None:
            self._commit_s.append(now - self._complete_at)
            self._complete_at = None
