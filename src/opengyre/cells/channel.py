"""A two-way message channel between the conductor and a cell: length-prefixed MessagePack over a stream.

    conductor                         cell
    call(op, …)  ── [0, id, op, args] ──▶  handler(op)
                 ◀─ [1, id, result]   ──
    on_event     ◀─ [2, op, args]     ──  notify(op, …)

A call waits for its answer; a dead peer wakes every waiter with a CellError. Bulk bytes do not travel here but through
the transfer seam.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from opengyre.errors import CellError, CellSilent, OpenGyreError

Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]
EventHandler = Callable[[str, dict[str, Any]], None]

_CALL, _ANSWER, _EVENT, _FAILURE = range(4)
_HEADER_BYTES = 4  # frames up to 4 GiB; samples of a micro-step are the largest thing sent


class Channel:
    """One end of the connection. ``on_call`` answers the peer's calls, ``on_event`` takes its notifications."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer: str,
        on_call: Handler | None = None,
        on_event: EventHandler | None = None,
    ) -> None:
        self.peer = peer
        self.on_call, self.on_event = on_call, on_event
        self.closed = asyncio.Event()
        self._reader, self._writer = reader, writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._pump = asyncio.create_task(self._read(), name=f"channel {peer}")

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the peer and wait for its answer.

        Raises:
            CellSilent: the peer did not answer within ``timeout_s``.
            CellError: the peer is gone; or the peer's own error, re-raised.
        """
        if self.closed.is_set():
            raise CellError(f"is gone; cannot {op}", where=self.peer)
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send([_CALL, number, op, args])
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise CellSilent(f"did not answer {op} within {timeout_s} s", where=self.peer) from None
        finally:
            self._waiting.pop(number, None)

    def notify(self, op: str, **args: Any) -> None:
        """Tell the peer something; nothing comes back."""
        if not self.closed.is_set():
            self._send([_EVENT, op, args])

    async def close(self) -> None:
        """Close the connection; waiting calls get a CellError."""
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump

    def _send(self, message: list[Any]) -> None:
        frame = msgspec.msgpack.encode(message)
        self._writer.write(len(frame).to_bytes(_HEADER_BYTES, "little") + frame)

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_HEADER_BYTES), "little")
                self._take(msgspec.msgpack.decode(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(CellError("is gone", where=self.peer))
            self._writer.close()

    def _take(self, message: list[Any]) -> None:
        match message:
            case [kind, number, body] if kind == _ANSWER:
                self._settle(number, body, None)
            case [kind, number, what, error_type] if kind == _FAILURE:
                self._settle(number, None, _rebuild(error_type, what, self.peer))
            case [kind, op, args] if kind == _EVENT and self.on_event:
                self.on_event(op, args)
            case [kind, number, op, args] if kind == _CALL:
                task = asyncio.create_task(self._answer(number, op, args), name=f"{self.peer} {op}")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    def _settle(self, number: int, result: Any, error: Exception | None) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():
            return  # the caller gave up
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    async def _answer(self, number: int, op: str, args: dict[str, Any]) -> None:
        try:
            if self.on_call is None:
                raise CellError(f"takes no calls ({op})", where=self.peer)
            reply = [_ANSWER, number, await self.on_call(op, args)]
        except OpenGyreError as error:
            reply = [_FAILURE, number, str(error), type(error).__name__]
        except Exception as error:  # noqa: BLE001 - a process boundary: the other side gets it as a CellError
            reply = [_FAILURE, number, f"{op}: {type(error).__name__}: {error}", "CellError"]
        if not self.closed.is_set():
            self._send(reply)


def _rebuild(error_type: str, what: str, peer: str) -> OpenGyreError:
    kinds = {kind.__name__: kind for kind in OpenGyreError.__subclasses__()}
    return kinds.get(error_type, CellError)(what, where=peer)
