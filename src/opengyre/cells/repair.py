"""Notices cells that break, and has each of them replaced, one replacement of a cell at a time.

    its process ends ───┐
    it does not answer ─┼─▶ broken(cell, reason) ─▶ renew; again if the new one breaks too ─▶ watched again
    somebody says so ───┘

What is said of a cell while it is replaced is no news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from opengyre.cells.live import LiveCell
from opengyre.cells.pulse import Pulse
from opengyre.cells.state import CellState
from opengyre.errors import CellError, TransferError


class Repair:
    """Watches live cells.

    Args:
        cells: all of them.
        renew: one attempt to give a broken cell a new process and its role back, for the reason given. Raises CellError
            or TransferError when that breaks too, anything else for good.
        fail: ends the run.
        pulse: beats when a replacement is over.
        every_s: between two questions to a serving cell, and how long it may take to answer.
    """

    def __init__(
        self,
        cells: Iterable[LiveCell],
        renew: Callable[[LiveCell, str], Awaitable[None]],
        *,
        fail: Callable[[BaseException], None],
        pulse: Pulse,
        every_s: float,
    ) -> None:
        self._cells, self._renew, self._fail, self._pulse, self._every_s = list(cells), renew, fail, pulse, every_s
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._renewing: set[str] = set()  # cells that are being replaced
        self._replacing: set[asyncio.Task[None]] = set()
        self._closing = False

    def watch(self, cell: LiveCell) -> None:
        """Notice when the process that ``cell`` has now ends."""
        self._watchers[cell.name] = asyncio.create_task(self._watch(cell), name=f"{cell.name} watcher")

    def close(self) -> list[asyncio.Task[None]]:
        """Replace nothing from now on; the tasks that are to be cancelled."""
        self._closing = True
        return [*self._watchers.values(), *self._replacing]

    async def probe(self) -> None:
        """Find rollout cells that are alive and do not answer. A training cell is silent while it computes; its leases
        run out instead."""
        while True:
            await asyncio.sleep(self._every_s)
            serving = [cell for cell in self._cells if cell.state is CellState.ROLLOUT]
            await asyncio.gather(*map(self._probe_one, serving))

    def broken(self, cell: LiveCell, reason: str) -> None:
        """Replace ``cell``, in a task of its own: whoever noticed must not wait for it, and may be ended by it."""
        task = asyncio.create_task(self._replace(cell, reason), name=f"{cell.name} replacement")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _watch(self, cell: LiveCell) -> None:
        tail = await cell.process.wait()
        self.broken(cell, tail.splitlines()[-1] if tail else "process ended")

    async def _probe_one(self, cell: LiveCell) -> None:
        process = cell.process
        try:
            load = await process.call("load", timeout_s=self._every_s)
            cell.kv_tokens = load["kv_tokens"]
        except CellError as error:
            if cell.has_process and cell.process is process:  # it may have been replaced meanwhile
                self.broken(cell, str(error))

    async def _replace(self, cell: LiveCell, reason: str) -> None:
        if self._closing or cell.name in self._renewing:
            return
        self._renewing.add(cell.name)
        if (watcher := self._watchers.pop(cell.name, None)) is not None:
            watcher.cancel()
        try:
            while True:
                try:
                    await self._renew(cell, reason)
                    self.watch(cell)
                    return
                except (CellError, TransferError) as error:
                    reason = str(error)
        except Exception as error:  # noqa: BLE001 - a task boundary: the conductor raises it
            self._fail(error)
        finally:
            self._renewing.discard(cell.name)
            self._pulse.beat()
