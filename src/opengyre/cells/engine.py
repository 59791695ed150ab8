"""The rollout engine inside a cell, as the proxy's router sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from opengyre.cluster.base import CellProcess
from opengyre.errors import EngineError
from opengyre.rollout.base import EngineLoad, GenerateRequest, TokenChunk
from opengyre.rollout.tokens import to_wire


class CellEngine:
    """Implements rollout.base.RolloutEngine over a cell's channel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cell: CellProcess | None = None
        self._calls: dict[str, asyncio.Queue[TokenChunk | EngineError]] = {}

    def attach(self, cell: CellProcess) -> None:
        """Serve through ``cell`` from now on (a restarted cell keeps its engine's name)."""
        self._cell = cell

    def detach(self, reason: str) -> None:
        """The cell is gone: every running call gets an EngineError and goes on elsewhere."""
        self._cell = None
        for queue in self._calls.values():
            queue.put_nowait(EngineError(reason, where=self.name))

    def on_event(self, op: str, args: dict[str, Any]) -> None:
        """Take a ``chunk`` or ``refused`` notification from the cell."""
        queue = self._calls.get(args["call_id"])
        if queue is None:
            return  # the caller has gone; the abort is on its way
        if op == "chunk":
            queue.put_nowait(msgspec.convert(args["chunk"], TokenChunk))
        else:
            queue.put_nowait(EngineError(args["reason"], where=self.name))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a call's tokens; closing the iterator aborts the call. Raises EngineError (refused, or cell lost)."""
        cell = self._cell
        if cell is None:
            raise EngineError("has no cell", where=self.name)
        queue: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        self._calls[request.call_id] = queue
        cell.notify("submit", request=msgspec.to_builtins(request, enc_hook=to_wire, builtin_types=(bytes,)))
        ended = False
        try:
            while not ended:
                item = await queue.get()
                ended = isinstance(item, EngineError) or item.finish is not None
                if isinstance(item, EngineError):
                    raise item
                yield item
        finally:
            self._calls.pop(request.call_id, None)
            if not ended:
                cell.notify("abort", call_id=request.call_id)

    async def load(self) -> EngineLoad:
        """Current load. Raises EngineError if the cell is gone."""
        if self._cell is None:
            raise EngineError("has no cell", where=self.name)
        return msgspec.convert(await self._cell.call("load"), EngineLoad)
