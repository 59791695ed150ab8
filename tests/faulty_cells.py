"""Cells of a test that fail when they are told to, and a clock that does not wait.

A ``FaultyCell`` answers the conductor's calls as a real one does (``cells/worker.py``), with numbers for gradients: its
sum is the multiset of the micro-steps that went into it. A fault strikes at one call: ``error`` (the call fails),
``slow`` (it is done long after its deadline), ``hangs`` (the process never answers again), ``dies``.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from opengyre.cluster.base import CellSpec
from opengyre.errors import CellError, CellSilent
from opengyre.rollout.base import REGIONS, GenerateRequest, TokenChunk
from opengyre.rollout.tokens import from_wire
from opengyre.training.base import MicroStats

T = TypeVar("T")

OP_S, TOKEN_S, SLOW_S = 0.1, 0.2, 150.0
LIMIT_S = 100_000.0  # virtual; nothing that goes on takes so long


class _NoWaiting(selectors.DefaultSelector):
    """Passes time instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise AssertionError("nothing will ever happen again: a deadlock")
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
            assert self.now < LIMIT_S, "goes on without end"
        return ready


def run_without_waiting(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a virtual clock. Fails when all tasks wait for each other."""
    selector = _NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


@dataclass
class Fault:
    """Strikes ``cell`` at its ``nth`` call of ``op`` (from 1, over all its lives)."""

    cell: str
    op: str
    nth: int
    kind: str


@dataclass
class Plan:
    """The faults of a run, and what it saw."""

    faults: list[Fault]
    struck: list[Fault] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    committed: list[Counter[int]] = field(default_factory=list)  # what each step's optimizer saw
    stored: dict[str, Any] = field(default_factory=dict)  # the transfer

    def strike(self, cell: str, op: str) -> str | None:
        self.calls[cell, op] += 1
        for fault in self.faults:
            if (fault.cell, fault.op, fault.nth) == (cell, op, self.calls[cell, op]):
                self.struck.append(fault)
                return fault.kind
        return None


class FaultyCell:
    """One life of a cell. Implements ``cluster.base.CellProcess``."""

    def __init__(self, spec: CellSpec, on_event: Any, plan: Plan) -> None:
        self.name, self.pid = spec.name, plan.lives[spec.name]
        self._core, self._on_event, self._plan = spec.core, on_event, plan
        self._ended, self._hung = asyncio.Event(), False
        self._regions: set[str] = set()
        self._version, self._sum = -1, Counter[int]()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # one thread: calls are answered one after the other

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        if self._ended.is_set():
            raise CellError(f"is gone; cannot {op}", where=self.name)
        answer = asyncio.create_task(self._answer(op, args))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({answer, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if ended.done():
                raise CellError(f"ended during {op}", where=self.name)
            raise CellSilent(f"did not answer {op}", where=self.name)
        finally:
            ended.cancel()

    def notify(self, op: str, **args: Any) -> None:
        if self._ended.is_set() or self._hung:
            return
        if op == "submit":
            request = msgspec.convert(args["request"], GenerateRequest, dec_hook=from_wire, builtin_types=(bytes,))
            if self._regions != set(REGIONS) or self._version < 0:
                self._on_event("refused", {"call_id": request.call_id, "reason": "is not serving"})
                return
            self._running[request.call_id] = asyncio.create_task(self._sample(request))
        elif op == "abort" and (task := self._running.pop(args["call_id"], None)):
            task.cancel()

    async def wait(self) -> str:
        await self._ended.wait()
        return "killed by the test"

    async def stop(self, grace_s: float) -> None:
        self._end()

    def _end(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._ended.set()

    async def _answer(self, op: str, args: dict[str, Any]) -> Any:
        fault = self._plan.strike(self.name, op)
        if fault == "dies":
            self._end()
            await asyncio.sleep(SLOW_S)
        async with self._turn:
            if fault == "hangs":
                self._hung = True
                for task in self._running.values():
                    task.cancel()
            if self._hung:
                await asyncio.Event().wait() if not self._ended.is_set() else None
            await asyncio.sleep(SLOW_S if fault == "slow" else OP_S)
            if fault == "error":
                raise CellError(f"cannot {op}: the test says so", where=self.name)
            return getattr(self, f"_{op}")(**args)

    async def _sample(self, request: GenerateRequest) -> None:
        for n in range(request.max_new_tokens):
            await asyncio.sleep(TOKEN_S)
            last = n == request.max_new_tokens - 1
            self._send(request.call_id, TokenChunk([1], [-0.5], self._version, "stop" if last else None))
        del self._running[request.call_id]

    def _send(self, call_id: str, chunk: TokenChunk) -> None:
        self._on_event("chunk", {"call_id": call_id, "chunk": msgspec.to_builtins(chunk)})

    # --- the calls

    def _load(self) -> dict[str, Any]:
        return {}

    def _preempt(self, export_kv: bool) -> dict[str, int]:
        calls = list(self._running.items())
        self._running = {}
        for call_id, task in calls:
            task.cancel()
            self._send(call_id, TokenChunk([], [], self._version, "preempted"))
        return {"calls": len(calls), "kv_tokens": 0}

    def _release(self, regions: list[str]) -> None:
        assert not self._running, "memory is taken from under running calls"
        self._regions -= set(regions)

    def _resume(self, regions: list[str]) -> None:
        self._regions |= set(regions)

    def _pull(self, ref: dict[str, Any], version: int) -> None:
        self._version, self._sum = version, Counter()

    def _publish(self, key: str) -> dict[str, Any]:
        return {"key": key}

    def _micro_step(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        self._sum[int(samples[0]["sample_id"])] += 1
        return msgspec.to_builtins(MicroStats(0.0, 1, 1, 0, 1.0, 1.0, 1, 0.0, 1.0))  # type: ignore[no-any-return]

    def _take_gradients(self, key: str) -> dict[str, Any]:
        self._plan.stored[key], self._sum = self._sum, Counter()
        return {"key": key}

    def _add_gradients(self, ref: dict[str, Any]) -> None:
        self._sum += self._plan.stored[ref["key"]]

    def _drop_gradients(self) -> None:
        self._sum = Counter()

    def _commit(self, n_executions: int) -> int:
        self._plan.committed.append(self._sum)
        self._sum, self._version = Counter(), self._version + 1
        return self._version


class FaultyCluster:
    """Implements ``cluster.base.Cluster``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cells: list[FaultyCell] = []

    async def start(self, spec: CellSpec, on_event: Any) -> FaultyCell:
        await asyncio.sleep(OP_S)
        self._plan.lives[spec.name] += 1
        self._cells.append(FaultyCell(spec, on_event, self._plan))
        return self._cells[-1]

    async def close(self) -> None:
        for cell in self._cells:
            await cell.stop(0.0)
