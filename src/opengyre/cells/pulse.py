"""A condition that many tasks wait for and anyone may signal; signals are never lost between two looks."""

from __future__ import annotations

import asyncio
import contextlib


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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow a cancellation
                await self._event.wait()
