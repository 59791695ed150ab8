"""A condition that many tasks wait for and anyone may signal; signals are never lost between two looks."""

from __future__ import annotations

import asyncio


class Pulse:
    """``seen = pulse.count`` … look at the world … ``await pulse.after(seen)``."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Wake everyone who waits."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def after(self, seen: int, timeout_s: float | None = None) -> None:
        """Return when the count has passed ``seen``, or after ``timeout_s``."""
        if self.count > seen:
            return
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return
