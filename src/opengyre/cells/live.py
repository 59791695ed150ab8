"""One cell of a live run: its process, its engine, its state, and the two role switches.

    ROLLOUT ──▶ draining ──▶ releasing ──▶ joining_training ──▶ TRAINING       to_training
                leave the    free the KV   pull weights         claim
                balancer,
                stop calls
    TRAINING ─▶ flushing ──▶ pulling ────▶ joining_rollout ───▶ ROLLOUT        to_rollout
                hand over    weights       take KV back         enter the balancer, last

A call that is stopped goes on elsewhere from its tokens (proxy/calls.py); the harness keeps its open response. Every
phase has a deadline. One that is missed, or fails, is rolled back (``roll_back``) if the process still answers; else
the process is replaced. A call of any kind that stays unanswered for too long is reported through ``on_silence``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from opengyre.cells.engine import CellEngine
from opengyre.cells.state import CellMachine, CellState
from opengyre.cells.training_loop import TrainingLoop
from opengyre.cluster.base import CellProcess, CellSpec, Cluster
from opengyre.errors import CellError, CellSilent
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

    @property
    def total_s(self) -> float:
        """All phases together, seconds."""
        return round(sum(self.phases.values()), 4)


class _Overheard:
    """A cell's process; a call that it leaves unanswered is told to ``on_silence``. Implements ``CellProcess``."""

    def __init__(self, process: CellProcess, silence_s: float, on_silence: Callable[[str], None]) -> None:
        self.name, self.pid = process.name, process.pid
        self.notify, self.wait, self.stop = process.notify, process.wait, process.stop
        self._process, self._silence_s, self._on_silence = process, silence_s, on_silence

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the cell, with an end to patience."""
        try:
            return await self._process.call(op, timeout_s=timeout_s or self._silence_s, **args)
        except CellSilent as error:
            if timeout_s is None:
                self._on_silence(str(error))
            raise


class LiveCell:
    """Knows its process and the router; which role comes when is the controller's business.

    Args:
        spec: what its process is told.
        machine: its state; changes only through this object from now on.
        router: the balancer it serves in.
        slots: executions it serves at once at full speed.
        kv_transfer: hand the KV of stopped calls over.
        silence_s: a call unanswered for so long means that the process hangs.
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
        silence_s: float,
        events: EventLog,
    ) -> None:
        self.spec = spec
        self.engine = CellEngine(spec.name)
        self.version = -1
        self.kv_tokens: int | None = None  # KV its engine holds, when it was last asked; None: not asked in this role
        self.training: asyncio.Task[None] | None = None
        self.switching: asyncio.Task[None] | None = None
        self._process: CellProcess | None = None
        self._loop: TrainingLoop | None = None
        self._machine, self._events = machine, events
        self._published: Callable[[], Published] = lambda: Published(-1, {})
        self._on_change: Callable[[], None] = lambda: None
        self._on_silence: Callable[[str], None] = lambda reason: None
        self._silence_s = silence_s
        self._router, self._slots, self._kv_transfer = router, slots, kv_transfer

    def connect(
        self,
        *,
        published: Callable[[], Published],
        on_change: Callable[[], None],
        on_silence: Callable[[str], None],
    ) -> None:
        """Where the weights to hold are found; who hears of each change of state, and of a process that hangs."""
        self._published, self._on_change, self._on_silence = published, on_change, on_silence

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
        process = await cluster.start(self.spec, self.engine.on_event)
        self._process = _Overheard(process, self._silence_s, self._on_silence)
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
        """Leave the rollout role and join the open step. Raises CellError or TransferError."""
        switch = Switch("rollout>train")
        self._router.remove(self.name)
        async with self._phase(CellState.DRAINING, reason, switch, "drain_s"):
            moved = await self.process.call("preempt", export_kv=self._kv_transfer)
            switch.moved_calls, switch.kv_tokens = moved["calls"], moved["kv_tokens"]
        async with self._phase(CellState.RELEASING, reason, switch, "release_s"):
            await self.process.call("release", regions=["kv"])
        async with self._phase(CellState.JOINING_TRAINING, reason, switch, "pull_s"):
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
        """Hand over what is held, leave the training role and serve. Raises like ``to_training``."""
        switch = Switch("train>rollout")
        async with self._phase(CellState.FLUSHING, reason, switch, "flush_s"):
            if self._loop is not None and self.training is not None:
                self._loop.leave()
                await asyncio.shield(self.training)
            self._loop = self.training = None
            if not self.spec.core:  # the core's sums are the step's
                await self.process.call("drop_gradients")
        await self._serve(reason, switch)
        return switch

    async def first_serve(self, reason: str) -> None:
        """A fresh process takes the rollout role."""
        await self._serve(reason, Switch("start"))

    async def _serve(self, reason: str, switch: Switch) -> None:
        """Get the weights, take engine memory back, then enter the balancer: last."""
        async with self._phase(CellState.PULLING, reason, switch, "pull_s"):
            await self.pull()
        async with self._phase(CellState.JOINING_ROLLOUT, reason, switch, "resume_s"):
            await self.process.call("resume", regions=list(REGIONS))
            await self.pull()  # a step may have been committed meanwhile; from here on nothing is awaited
        self._open(reason)

    def _open(self, reason: str) -> None:
        self.kv_tokens = None
        self._to(CellState.ROLLOUT, reason)
        self._router.add(self.engine, self._slots)

    # --- when a switch fails

    async def roll_back(self, reason: str) -> bool:
        """After a failed phase: go to the role that is nearest. False: the process has to be replaced.

        Raises CellError or TransferError when the way back fails too.
        """
        role = self._machine.fallback()
        if not self.has_process or role in (None, CellState.DEAD):
            return False
        if role is CellState.TRAINING:  # the core did not get away from its micro-step: it goes on
            if self._loop is None or self.training is None or self.training.done():
                return False
            self._loop.stay()
            self._to(CellState.TRAINING, reason)
            return True
        if self.training is not None:
            self.training.cancel()
            self._loop = self.training = None
        await self.process.call("load", timeout_s=self._machine.patience_s)
        if role is CellState.ROLLOUT:  # it has given up nothing yet
            await self.process.call("resume", timeout_s=self._machine.patience_s, regions=list(REGIONS))
            await self.pull()
            self._open(reason)
            return True
        await self.process.call("drop_gradients")
        await self._serve(reason, Switch("rollback"))
        return True

    @contextlib.asynccontextmanager
    async def _phase(self, state: CellState, reason: str, switch: Switch, name: str) -> AsyncIterator[None]:
        """Enter a state and do its work within its deadline, timed on the run's clock."""
        self._to(state, reason)
        began = self._machine.now
        try:
            async with asyncio.timeout(self._machine.patience_s):
                yield
        except TimeoutError:
            raise CellError(f"{state} took longer than {self._machine.patience_s:g} s", where=self.name) from None
        finally:
            switch.phases[name] = round(self._machine.now - began, 4)

    def _to(self, state: CellState, reason: str) -> None:
        self._machine.to(state)
        pid = self._process.pid if self._process is not None else None
        self._events.emit("cell", cell=self.name, state=state.value, reason=reason, pid=pid)
        self._on_change()
