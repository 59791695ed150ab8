"""What a cell in the training role does until it is told to leave.

    ┌─▶ claim ──none──▶ hand over what is held ──nothing held──▶ wait for the pulse ─┐
    │     │                                                                          │
    │   micro-step ──▶ held ──(core, or flush_every reached)──▶ hand over            │
    └─────┴──────────────────────────────────────────────────────────────────────────┘

The core adds its own micro-steps in place; a satellite's sum travels once per hand-over. A sum is counted first and
added second, both under the core's lock, which the commit takes too: no step is committed between the two. Leaving ends
the loop after the micro-step at hand, with everything handed over.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from opengyre.cells.pulse import Pulse
from opengyre.cells.step import MicroClaim, OpenStep
from opengyre.cluster.base import CellProcess
from opengyre.errors import CellError, TransferError
from opengyre.samples.types import to_wire
from opengyre.training.base import MicroStats


class TrainingWork(Protocol):
    """Where a training cell finds its work and its core."""

    pulse: Pulse
    core_lock: asyncio.Lock

    @property
    def open_step(self) -> OpenStep | None:
        """The step that takes gradients now."""
        ...

    @property
    def core_alive(self) -> bool:
        """False from the moment the core's loss is known until it is replaced."""
        ...

    @property
    def core_process(self) -> CellProcess:
        """The core cell's process. Raises CellError while it is being replaced."""
        ...

    def core_broken(self, process: CellProcess, reason: str) -> None:
        """This process of the core's failed a call; it is replaced unless it was already."""
        ...

    async def bring_up_to_date(self, cell: str) -> None:
        """Make ``cell`` hold the published weights."""
        ...


class TrainingLoop:
    """Runs one cell's share of the open steps."""

    def __init__(self, name: str, process: CellProcess, *, core: bool, flush_every: int, work: TrainingWork) -> None:
        self.name = name
        self._process, self._core, self._work = process, core, work
        self._flush_every = 1 if core else flush_every
        self._held: list[MicroClaim] = []
        self._held_of: OpenStep | None = None
        self._pushes = 0
        self._leaving = False
        self._adding: asyncio.Task[None] | None = None

    def stay(self) -> None:
        """Take back ``leave``, if the loop has not ended yet."""
        self._leaving = False

    def leave(self) -> None:
        """End after the micro-step at hand; what is held is handed over first."""
        self._leaving = True
        self._work.pulse.beat()

    async def run(self) -> None:
        """Claim, compute, hand over, until told to leave. Raises CellError when the cell dies."""
        while True:
            seen = self._work.pulse.count
            if await self._one_micro_step():
                continue
            if self._held:
                await self._hand_over()
            elif self._leaving:
                return
            else:
                await self._work.pulse.after(seen)

    async def _one_micro_step(self) -> bool:
        step = self._work.open_step
        if self._leaving or step is None or (self._held and step is not self._held_of) or not step.claimable:
            return False
        await self._work.bring_up_to_date(self.name)
        claim = step.claim(self.name, core=self._core)
        if claim is None:
            return False
        stats = await self._process.call("micro_step", samples=[to_wire(s) for s in claim.micro])
        self._held_of = step
        if not step.computed(claim, msgspec.convert(stats, MicroStats)):
            await self._drop(step)
            return True
        self._held.append(claim)
        if len(self._held) >= self._flush_every:
            await self._hand_over()
        return True

    async def _hand_over(self) -> None:
        claims, step = self._held, self._held_of
        self._held, self._held_of = [], None
        assert step is not None
        self._pushes += 1
        if self._core:
            if not step.hand_over(self.name, self._pushes, claims):
                await self._drop(step)
            return
        ref = await self._process.call("take_gradients", key=f"gradients-{self.name}-{step.number}-{self._pushes}")
        # Once counted, a sum is added or revoked whatever happens to this loop.
        self._adding = asyncio.create_task(self._add(step, ref, claims), name=f"{self.name} hand-over")
        await asyncio.shield(self._adding)

    async def _add(self, step: OpenStep, ref: dict[str, Any], claims: list[MicroClaim]) -> None:
        async with self._work.core_lock:
            if not self._work.core_alive:
                step.lose(self.name)
                return
            if step is not self._work.open_step or not step.hand_over(self.name, self._pushes, claims):
                return  # taking emptied the cell's sum; what was taken goes nowhere
            core = self._work.core_process
            try:
                await core.call("add_gradients", ref=ref)
            except TransferError:
                step.revoke(self.name, self._pushes, claims)
            except CellError as error:  # dead, or its sum is unknown: its replacement resets the step
                self._work.core_broken(core, str(error))

    async def _drop(self, step: OpenStep) -> None:
        """Forget the cell's sum. The core's holds other cells' work too, so all of the step is to be done again."""
        self._held = []
        await self._process.call("drop_gradients")
        if self._core:
            step.core_reset()
