"""Heavy work, let into the event loop one piece a turn.

    a thousand requests arrive ──▶ in line ──▶ one is read and rendered ──▶ everything else that is due ──▶ the next
    fifty calls are durable    ──▶    "    ──▶ one enters its tree, and is answered

Without it a loop works through all that is ready before it looks at its timers and sockets again: a thousand requests
of 2 ms each would keep every keep-alive waiting for 2 s. All other work of a call follows from these two steps, so
nothing else needs to stand in line.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """One turn of an event loop for each who asks, first come, first served."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._taken = False  # this turn of the loop

    async def take(self) -> None:
        """Wait for a turn of one's own; at once if nobody has this one."""
        if not self._taken:
            self._begin()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._next()  # given in the very moment we were cancelled
            raise

    def _begin(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._taken = False
        while self._line:
            future = self._line.popleft()
            if not future.done():
                self._begin()
                future.set_result(None)
                return
