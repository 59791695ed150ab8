"""One cell of a live run: its process, its engine, its state, and the two role switches.

    ROLLOUT ──▶ draining ──▶ releasing ──▶ joining_training ──▶ TRAINING       to_training
                leave the    free the KV   pull weights         claim
                balancer,
                stop calls
    TRAINING ─▶ flushing ──▶ pulling ────▶ joining_rollout ───▶ ROLLOUT        to_rollout
                hand over    weights       take KV back         enter the balancer, last

A call that is stopped goes on elsewhere from its tokens (proxy/calls.py); the harness keeps its open response.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opengyre.cells.engine import CellEngine
from opengyre.cells.state import CellMachine, CellState
from opengyre.cells.training_loop import TrainingLoop
from opengyre.cluster.base import CellProcess, CellSpec, Cluster
from opengyre.errors import CellError
from opengyre.proxy.router import Router
from opengyre.rollout.base import REGIONS
from opengyre.watch.events import EventLog


@dataclass(frozen=True)
class Published:
    """Weights that any cell can pull."""

    version: int
    ref: dict[str, Any]


@dataclass
class Switch:
    """What a role switch took: seconds by phase, calls moved, KV tokens handed over."""

    direction: str
    phases: dict[str, float] = field(default_factory=dict)
    moved_calls: int = 0
    kv_tokens: int = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(time.monotonic() - began, 4)

    @property
    def total_s(self) -> float:
        """All phases together, seconds."""
        return round(sum(self.phases.values()), 4)


class LiveCell:
    """Knows its process and the router; which role comes when is the controller's business.

    Args:
        spec: what its process is told.
        machine: its state; changes only through this object from now on.
        router: the balancer it serves in.
        slots: executions it serves at once at full speed.
        kv_transfer: hand the KV of stopped calls over.
        events: where each change of state is logged.
    """

    def __init__(
        self,
        spec: CellSpec,
        machine: CellMachine,
        router: Router,
        *,
        slots: int,
        kv_transfer: bool,
        events: EventLog,
    ) -> None:
        self.spec = spec
        self.engine = CellEngine(spec.name)
        self.version = -1
        self.training: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self._process: CellProcess | None = None
        self._loop: TrainingLoop | None = None
        self._machine, self._events = machine, events
        self._published: Callable[[], Published] = lambda: Published(-1, {})
        self._on_change: Callable[[], None] = lambda: None
        self._router, self._slots, self._kv_transfer = router, slots, kv_transfer

    def connect(self, *, published: Callable[[], Published], on_change: Callable[[], None]) -> None:
        """Where the weights to hold are found, and who hears of each change of state."""
        self._published, self._on_change = published, on_change

    @property
    def name(self) -> str:
        """The cell's name."""
        return self.spec.name

    @property
    def state(self) -> CellState:
        """Where it is now."""
        return self._machine.state

    @property
    def since(self) -> float:
        """When it entered its state, seconds on the run's clock."""
        return self._machine.since

    @property
    def process(self) -> CellProcess:
        """The running process. Raises CellError while there is none."""
        if self._process is None:
            raise CellError("has no process now", where=self.name)
        return self._process

    @property
    def has_process(self) -> bool:
        """True while there is a process to ask."""
        return self._process is not None

    @property
    def running(self) -> int:
        """Calls that its engine serves now."""
        return len(self._router.running(self.name))

    async def start(self, cluster: Cluster) -> None:
        """Start the process; the cell has no role and no weights of the run yet."""
        if self.state is CellState.DEAD:
            self._to(CellState.STARTING, "restart")
        self._process = await cluster.start(self.spec, self.engine.on_event)
        self.engine.attach(self._process)
        self.version = -1

    def lost(self, reason: str) -> None:
        """The process has died: nothing is routed here, running calls go on elsewhere, its loop ends."""
        self._router.remove(self.name)
        self._process, self._loop = None, None
        self.engine.detach(reason)
        for task in (self.training, self.switching):
            if task is not None:
                task.cancel()
        self.training = self.switching = None
        self._to(CellState.DEAD, reason)

    async def pull(self) -> None:
        """Hold the weights that are published by then; calls that run here go on with them."""
        while self.version != (weights := self._published()).version:
            await self.process.call("pull", ref=weights.ref, version=weights.version)
            self.version = weights.version

    async def to_training(self, loop: TrainingLoop, reason: str) -> Switch:
        """Leave the rollout role and join the open step."""
        switch = Switch("rollout>train")
        self._to(CellState.DRAINING, reason)
        with switch.phase("drain_s"):
            self._router.remove(self.name)
            moved = await self.process.call("preempt", export_kv=self._kv_transfer)
            switch.moved_calls, switch.kv_tokens = moved["calls"], moved["kv_tokens"]
        self._to(CellState.RELEASING, reason)
        with switch.phase("release_s"):
            await self.process.call("release", regions=["kv"])
        self._to(CellState.JOINING_TRAINING, reason)
        with switch.phase("pull_s"):
            await self.pull()
        self.train(loop, reason)
        return switch

    def train(self, loop: TrainingLoop, reason: str) -> None:
        """Enter the training role."""
        if self.state is CellState.STARTING:
            self._to(CellState.JOINING_TRAINING, reason)
        self._to(CellState.TRAINING, reason)
        self._loop = loop
        self.training = asyncio.create_task(loop.run(), name=f"{self.name} training")

    async def to_rollout(self, reason: str) -> Switch:
        """Hand over what is held, leave the training role and serve."""
        switch = Switch("train>rollout")
        self._to(CellState.FLUSHING, reason)
        with switch.phase("flush_s"):
            if self._loop is not None and self.training is not None:
                self._loop.leave()
                await self.training
            self._loop = self.training = None
            if not self.spec.core:  # the core's sums are the step's
                await self.process.call("drop_gradients")
        with switch.phase("pull_s"):
            self._to(CellState.PULLING, reason)
            await self.pull()
        with switch.phase("resume_s"):
            await self._serve(reason)
        return switch

    async def first_serve(self, reason: str) -> None:
        """A fresh process takes the rollout role."""
        self._to(CellState.PULLING, reason)
        await self.pull()
        await self._serve(reason)

    async def _serve(self, reason: str) -> None:
        """Take engine memory back, then enter the balancer: last."""
        self._to(CellState.JOINING_ROLLOUT, reason)
        await self.process.call("resume", regions=list(REGIONS))
        await self.pull()  # a step may have been committed meanwhile; from here on nothing is awaited
        self._to(CellState.ROLLOUT, reason)
        self._router.add(self.engine, self._slots)

    def _to(self, state: CellState, reason: str) -> None:
        self._machine.to(state, reason)
        pid = self._process.pid if self._process is not None else None
        self._events.emit("cell", cell=self.name, state=state.value, reason=reason, pid=pid)
        self._on_change()
