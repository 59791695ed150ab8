"""Role switches searched for dead ends: a failure of every kind, at every call, and a second one on the way back.

The real controller, cells, router and ledger; cells that fail on command; virtual time. Whatever happens: every call of
a harness is answered, each micro-step counts once, every cell ends in a role, and the balancer knows exactly those that
serve (C01, C02; SPEC §3.7, §3.8).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from churn import Churn
from faulty_cells import Fault, FaultyCluster, Plan, run_without_waiting
from opengyre.cells.controller import Controller, Work
from opengyre.cells.live import LiveCell
from opengyre.cells.policies.base import Decision, Snapshot, hold
from opengyre.cells.state import CellMachine, CellState
from opengyre.cells.step import OpenStep
from opengyre.cluster.base import CellSpec
from opengyre.config import RunConfig, build
from opengyre.errors import CellError, EngineError
from opengyre.proxy.router import Router
from opengyre.record.types import Role
from opengyre.rollout.base import GenerateRequest
from opengyre.rollout.tokens import TokenIds
from opengyre.run.parts import switch_deadlines
from opengyre.samples.types import Sample
from opengyre.watch.events import EventLog

CELLS = (("core", True), ("satellite-1", False), ("satellite-2", False))
STEPS, MICRO_STEPS, CALLS, TOKENS = 3, 6, 16, 25
KINDS = ("error", "slow", "hangs", "dies")
SWITCH_OPS = ("preempt", "release", "pull", "micro_step", "take_gradients", "drop_gradients", "resume")
DEFECTS = {("micro_step", "error"), ("commit", "error"), ("publish", "error")}  # not accidents: these end a run
CORE_OPS = ("micro_step", "add_gradients", "commit", "publish")
CONFIG = build(
    {
        "cells": {"switch_deadline_s": 5.0, "silence_s": 100.0, "heartbeat_s": 20.0, "satellites": 2},
        "train": {"lease_s": 20.0, "flush_every": 2},
        "schedule": {"cooldown_s": 1.0},
    }
)


class ChurnUntilTheEnd(Churn):
    """Changes roles all the time, until the work is done."""

    over = False

    def decide(self, snapshot: Snapshot) -> Decision:
        return hold("over") if self.over else super().decide(snapshot)


class World:
    """A run without executions: calls that want tokens, steps that want gradients."""

    def __init__(self, folder: Path, plan: Plan, config: RunConfig = CONFIG) -> None:
        loop = asyncio.get_running_loop()
        self.plan, self.config, self.router, self.answered = plan, config, Router(), 0
        self.policy = ChurnUntilTheEnd(config)
        self.events = EventLog(folder / "events.jsonl", clock=loop.time)
        cells = [
            LiveCell(
                CellSpec(name, core, "run", {}, ""),
                CellMachine(name, core=core, deadline_s=switch_deadlines(config), clock=lambda: self.events.now),
                self.router,
                slots=4,
                kv_transfer=True,
                silence_s=config.cells.silence_s,
                events=self.events,
            )
            for name, core in CELLS
        ]
        self.controller = Controller(
            config,
            cells,
            FaultyCluster(plan),
            self.policy,
            self.events,
            work=lambda: Work(0, 0, 0, 0, 0, 0),
            restore_core=self._restore,
            on_roles=self._check,
        )
        self.version = 0

    async def _restore(self, core, version: int) -> int:
        await core.call("pull", ref={}, version=self.version)
        return self.version

    def _check(self) -> None:
        """At every change of state: the balancer knows no cell that does not serve."""
        serving = {cell.name for cell in self.controller.cells.values() if cell.state is CellState.ROLLOUT}
        assert set(self.router.engines) <= serving

    async def call(self, number: int) -> None:
        """One model call, moved on like the proxy does."""
        await asyncio.sleep(number)
        had = 0
        while had < TOKENS:
            lease = await self.router.acquire(f"e{number}", f"call-{number}")
            before, request = (
                had,
                GenerateRequest(f"call-{number}-{had}", f"e{number}", TokenIds(np.ones(1, np.int32)), TOKENS - had, []),
            )
            try:
                async with aclosing(lease.engine.generate(request)) as chunks:
                    async for chunk in chunks:
                        had += len(chunk.ids)
            except EngineError:
                pass
            lease.release(failed=had == before)
        self.answered += 1

    async def train(self) -> None:
        """Steps, one after the other, as the conductor has them made."""
        controller = self.controller
        for number in range(1, STEPS + 1):
            step = OpenStep(
                number,
                controller.published.version,
                lease_s=self.config.train.lease_s,
                life=0,
                pulse=controller.pulse,
                events=self.events,
                clock=lambda: self.events.now,
            )
            step.add_group([[_sample(100 * number + i)] for i in range(MICRO_STEPS)], 1)
            step.close()
            controller.open(step)
            while True:
                seen = controller.pulse.count
                async with controller.core_lock:
                    if step.complete and controller.core_alive:
                        try:
                            self.version = await controller.core_process.call("commit", n_executions=1)
                            controller.committed(self.version)
                            break
                        except CellError:
                            pass
                await controller.pulse.after(seen)
            await controller.publish()

    async def live(self) -> None:
        await self.controller.start()
        work = asyncio.gather(self.train(), *(self.call(n) for n in range(CALLS)))
        failure = self.controller.failure
        await asyncio.wait({work, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            work.cancel()
            failure.result()
        await work
        self.policy.over = True
        await self._settled()
        self.events.close()
        await self.controller.close()

    async def _settled(self) -> None:
        """Every cell back in a role, none on its way."""
        while True:
            seen = self.controller.pulse.count
            cells = self.controller.cells.values()
            if all(cell.state.stable and cell.switching is None for cell in cells):
                serving = {cell.name for cell in cells if cell.state is CellState.ROLLOUT}
                assert set(self.router.engines) == serving and not self.router.waiting
                return
            await self.controller.pulse.after(seen)


def _sample(number: int) -> Sample:
    ids = np.ones(2, np.int32)
    return Sample(
        sample_id=str(number),
        execution_id="e",
        query_id="q",
        role=Role.MAIN,
        ids=ids,
        mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        advantage=1.0,
        weight=1.0,
        oldest_version=0,
        newest_version=0,
    )


def survives(folder: Path, *faults: Fault) -> Plan:
    """Run a world with these faults; returns what happened."""
    plan = Plan(list(faults))

    async def main() -> World:
        world = World(folder, plan)
        await world.live()
        return world

    world = run_without_waiting(main())
    assert world.answered == CALLS
    # A commit whose answer was lost is done again on a restored core: the last one holds.
    by_step = {min(step) // 100: step for step in plan.committed if step}
    assert by_step == {n: Counter({100 * n + i: 1 for i in range(MICRO_STEPS)}) for n in range(1, STEPS + 1)}
    return plan


def test_without_faults_every_call_of_a_switch_is_made(tmp_path):
    plan = survives(tmp_path)
    made = {op for (cell, op), n in plan.calls.items() if cell == "satellite-1" and n}
    assert set(SWITCH_OPS) <= made and plan.lives == {"core": 1, "satellite-1": 1, "satellite-2": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", SWITCH_OPS)
def test_a_failed_phase_costs_no_call_and_no_gradient(tmp_path, op, kind):
    for nth in (1, 2, 3):
        (folder := tmp_path / str(nth)).mkdir()
        plan = survives(folder, Fault("satellite-1", op, nth, kind))
        assert plan.lives["core"] == 1  # the core is never lost to a satellite's switch
        if op in ("preempt", "release") and kind == "error" and plan.struck:
            assert plan.lives["satellite-1"] == 1  # rolled back, not replaced


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op in CORE_OPS for kind in KINDS if (op, kind) not in DEFECTS])
def test_a_failing_core_is_replaced_and_nothing_is_counted_twice(tmp_path, op, kind):
    survives(tmp_path, Fault("core", op, 2, kind))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("op", ["preempt", "release", "pull", "drop_gradients"])
def test_a_second_failure_on_the_way_back(tmp_path, op, first):
    for then, second in [(then, second) for then in ("load", "resume", "pull", "drop_gradients") for second in KINDS]:
        (folder := tmp_path / f"{then}-{second}").mkdir()
        survives(folder, *(Fault("satellite-1", op, 2, first), Fault("satellite-1", then, 2, second)))


def test_both_satellites_and_the_core_at_once(tmp_path):
    faults = [Fault("satellite-1", "release", 1, "hangs"), Fault("satellite-2", "preempt", 1, "dies")]
    survives(tmp_path, *faults, Fault("core", "add_gradients", 1, "dies"))
