"""Which engine serves a call: least loaded, staying where the session's prefix is cached.

    acquire ──▶ a free slot?  ──yes──▶ Lease(engine) ──release──▶ wakes the first waiter
                   │ no
                   ▼
                waits in line; woken by add(), release(), or the end of a suspicion

``remove`` is the first step of a role switch: from then on nothing new reaches the engine; what runs there ends when
the engine's own gate stops it. An engine that refuses or breaks is suspected for a moment, so that its calls go
elsewhere at once without anybody having to know why.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opengyre.rollout.base import RolloutEngine

SUSPECT_FIRST_S = 0.05  # a gate that is just closing is followed by remove() within this time
SUSPECT_MAX_S = 1.0  # an engine back from the dead is found again this soon


@dataclass(eq=False)
class _Seat:
    """One engine in the balancer."""

    engine: RolloutEngine
    slots: int
    calls: set[str] = field(default_factory=set)
    suspect_s: float = 0.0  # length of the current suspicion; 0: trusted
    suspected: bool = False
    listed: bool = True

    @property
    def open(self) -> bool:
        return self.listed and not self.suspected and len(self.calls) < self.slots

    @property
    def fill(self) -> float:
        return len(self.calls) / self.slots


class Lease:
    """One call's place at one engine. ``release`` is due exactly once; a second time does nothing."""

    def __init__(self, router: Router, seat: _Seat, call_id: str) -> None:
        self._router, self._seat, self._call_id = router, seat, call_id

    @property
    def engine(self) -> RolloutEngine:
        """The engine to call."""
        return self._seat.engine

    def release(self, *, failed: bool = False) -> None:
        """Give the place back. ``failed``: the engine refused or broke."""
        self._router._release(self._seat, self._call_id, failed)


class Router:
    """The balancer over the engines that serve. All methods belong to one event loop.

    ``on_change`` is called, without arguments, whenever an engine comes or goes or a call starts, ends or waits.
    """

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        self.on_change = on_change or (lambda: None)
        self._seats: dict[str, _Seat] = {}
        self._leaving: list[_Seat] = []
        self._home: dict[str, str] = {}  # session -> engine it was served by last
        self._line: deque[tuple[asyncio.Future[Lease], str, str]] = deque()
        self._idle: dict[str, list[asyncio.Future[None]]] = {}

    def add(self, engine: RolloutEngine, slots: int) -> None:
        """Put an engine into the balancer. One of the same name is replaced; its calls run on."""
        self.remove(engine.name)
        self._seats[engine.name] = _Seat(engine, slots)
        self._serve_line()

    def remove(self, name: str) -> None:
        """Take an engine out: it gets no further call. Unknown names are fine."""
        seat = self._seats.pop(name, None)
        if seat is not None:
            seat.listed = False
            if seat.calls:
                self._leaving.append(seat)
            self.on_change()

    async def acquire(self, session: str, call_id: str) -> Lease:
        """A place at an engine, as soon as one is free; first come, first served."""
        if not self._line and (seat := self._choose(session)) is not None:
            return self._seat(seat, session, call_id)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._line.append((future, session, call_id))
        self.on_change()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()  # given in the very moment we were cancelled
            self._line = deque(entry for entry in self._line if entry[0] is not future)
            raise

    async def drained(self, name: str) -> None:
        """Wait until no call runs at ``name``, whether it is still in the balancer or has just left it."""
        while self.running(name):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.setdefault(name, []).append(future)
            await future

    def running(self, name: str) -> frozenset[str]:
        """Ids of the calls that run at an engine."""
        here = [s for s in [*self._seats.values(), *self._leaving] if s.engine.name == name]
        return frozenset(call for seat in here for call in seat.calls)

    @property
    def engines(self) -> dict[str, int]:
        """Calls running per engine in the balancer."""
        return {name: len(seat.calls) for name, seat in self._seats.items()}

    @property
    def waiting(self) -> int:
        """Calls in line for a place."""
        return len(self._line)

    def forget(self, session: str) -> None:
        """Drop what is kept for a session."""
        self._home.pop(session, None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _choose(self, session: str) -> _Seat | None:
        free = [seat for seat in self._seats.values() if seat.open]
        if not free:
            return None
        best = min(free, key=lambda s: s.fill)
        home = self._seats.get(self._home.get(session, ""))
        # A cached prefix is worth a busier engine, but not half of its slots: then recomputing elsewhere is sooner.
        return home if home in free and home is not None and home.fill - best.fill <= 0.5 else best

    def _seat(self, seat: _Seat, session: str, call_id: str) -> Lease:
        seat.calls.add(call_id)
        self._home[session] = seat.engine.name
        self.on_change()
        return Lease(self, seat, call_id)

    def _release(self, seat: _Seat, call_id: str, failed: bool) -> None:
        if call_id not in seat.calls:
            return
        seat.calls.discard(call_id)
        if failed:
            self._suspect(seat)
        else:
            seat.suspect_s = 0.0
        if not seat.calls:
            if not seat.listed:
                self._leaving = [s for s in self._leaving if s is not seat]
            for future in self._idle.pop(seat.engine.name, []):
                if not future.done():
                    future.set_result(None)
        self._serve_line()

    def _suspect(self, seat: _Seat) -> None:
        if seat.suspected or not seat.listed:
            return
        seat.suspected = True
        seat.suspect_s = min(max(2 * seat.suspect_s, SUSPECT_FIRST_S), SUSPECT_MAX_S)
        asyncio.get_running_loop().call_later(seat.suspect_s, self._trust, seat)

    def _trust(self, seat: _Seat) -> None:
        seat.suspected = False
        self._serve_line()

    def _serve_line(self) -> None:
        while self._line:
            future, session, call_id = self._line[0]
            if future.done():
                self._line.popleft()
                continue
            seat = self._choose(session)
            if seat is None:
                break
            self._line.popleft()
            future.set_result(self._seat(seat, session, call_id))
        self.on_change()
