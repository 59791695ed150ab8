"""The conductor: makes every part of a live run, wires them, and drives the main loop. Nothing else knows all parts.

    ┌─▶ admit queries (within max_staleness) ─▶ GroupRunner ─▶ harness ─▶ proxy ─▶ rollout cells
    │                                               │ group complete
    │       open step ◀── micro-steps ── Harvest ◀──┘
    │          │ claims ▲ sums                         training cells, coming and going (cells/controller.py)
    │          ▼        │
    │       complete ─▶ core commits ─▶ journal, checkpoint ─▶ publish ─▶ cells pull
    └──────────────────────────────────────────────────────────────┘

Who waits for what: the main loop waits for completed groups until the step is full, then for the ledger to be complete.
Groups complete because every execution has a deadline; the ledger completes because every claim has a lease and the
core trains. A part that breaks for good sets ``controller.failure``, which the main loop waits for beside everything.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from msgspec import convert

from opengyre.cells.step import OpenStep
from opengyre.errors import CellError
from opengyre.executions.outcome import ExecutionResult
from opengyre.executions.task import Task
from opengyre.run.parts import Parts
from opengyre.run.summary import StepGroups, Summary
from opengyre.samples.build import pack_micro_steps
from opengyre.training import folders as checkpoints
from opengyre.training.base import StepStats

T = TypeVar("T")


class Conductor:
    """One run, from where its run folder stands to its last step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.prepared.config
        self._groups, self._assembler = parts.groups, parts.assembler
        self._controller, self._journal, self._events = parts.controller, parts.journal, parts.events
        self._run_dir = parts.prepared.run_dir
        self._step_groups = StepGroups()
        self._results: dict[str, list[ExecutionResult]] = {}
        self._step_began = self._events.now
        self._collecting: asyncio.Task[None] | None = None

    async def run(self) -> Summary:
        """Evaluate, train ``steps`` steps, evaluate. Raises what broke for good."""
        before = await self._evaluate("before")
        self._resume_queries()
        self._collecting = asyncio.create_task(self._collect(), name="collect")
        try:
            while self._assembler.version < self._config.steps:
                await self._one_step()
                if self._config.eval.every > 0 and self._assembler.version % self._config.eval.every == 0:
                    await self._evaluate(f"step-{self._assembler.version}")
        finally:
            self._collecting.cancel()
            self._collecting = None
        after = await self._evaluate("after")
        version = self._controller.published.version
        return Summary(self._assembler.version, version, before, after)

    async def _one_step(self) -> None:
        """Fill one step while it is being trained, then commit it."""
        step = self._open_step()
        while True:
            seen = self._controller.pulse.count
            self._admit()
            self._join(step)
            if self._assembler.step_full:
                break
            await self._watched(self._controller.pulse.after(seen))
        step.close()
        await self._watched(self._commit(step))

    def _open_step(self) -> OpenStep:
        self._step_groups = StepGroups()
        step = OpenStep(
            self._assembler.version + 1,
            self._controller.published.version,
            lease_s=self._config.train.lease_s,
            life=self._parts.life,
            pulse=self._controller.pulse,
            events=self._events,
            clock=lambda: self._events.now,
        )
        self._controller.open(step)
        return step

    def _admit(self) -> None:
        """Start as many queries as the staleness bound allows and the policy wants now."""
        for _ in range(self._controller.admit(self._assembler.admissible())):
            number = self._assembler.admitted
            task = self._task(number)
            query_id = f"q{number:06d}"
            self._journal.admit(query_id, task.task_id, "train", self._assembler.version)
            self._assembler.admit(query_id)
            version = self._controller.published.version
            self._events.emit("query", query=query_id, task=task.task_id, state="admitted", version=version)
            self._groups.submit(number, task)

    def _task(self, number: int) -> Task:
        """Task of the query with this number: every task once per epoch, each epoch in an order of its own."""
        tasks = self._parts.prepared.train
        epoch, place = divmod(number, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        return tasks[order[place]]

    async def _collect(self) -> None:
        """Take in groups as they complete, whatever the main loop waits for: policies wait for exactly this."""
        while True:
            self._completed(*await self._groups.next_complete())
            self._controller.pulse.beat()

    def _completed(self, query_id: str, results: list[ExecutionResult]) -> None:
        self._journal.complete(query_id)
        self._results[query_id] = results
        scored = any(self._parts.harvest.reward(result) is not None for result in results)
        if scored and self._assembler.complete(query_id):
            state = "complete"
        else:
            if not scored:
                self._assembler.drop(query_id)
            self._journal.drop(query_id)
            state = "dropped"
        if error := self._parts.guard.query(dropped=state == "dropped"):
            raise error
        self._events.emit("query", query=query_id, task=results[0].task_id, state=state)

    def _join(self, step: OpenStep) -> None:
        """Groups that fit the open step become claimable micro-steps."""
        for query_id in self._assembler.take():
            group = self._parts.harvest.group(query_id, self._results[query_id])
            micro_steps = pack_micro_steps(
                group.samples,
                self._config.train.micro_step_tokens,
                shared_prefix=True,
                row=self._config.train.row_tokens,
            )
            step.add_group(micro_steps, group.advantage.valid)
            results = self._results.pop(query_id)
            self._step_groups.add(query_id, results, group)
            for result in results:
                self._parts.door.forget(result.execution_id)

    async def _commit(self, step: OpenStep) -> None:
        """Wait until every micro-step counts, apply the step, make it durable, publish it."""
        while True:
            seen = self._controller.pulse.count
            async with self._controller.core_lock:
                if step.complete and self._controller.core_alive and self._controller.core_trains:
                    try:
                        await self._apply(step)
                    except CellError as error:  # the core is being replaced; the step starts over on the new one
                        self._events.emit("note", level="warning", text=f"step {step.number} not committed: {error}")
                    else:
                        break
            await self._controller.pulse.after(seen)
        await self._controller.publish()
        checkpoints.prune(self._run_dir, self._config.train.keep_checkpoints)

    async def _apply(self, step: OpenStep) -> None:
        core, controller, groups = self._controller.core_process, self._controller, self._step_groups
        stats = None
        if step.micro_steps:
            stats = convert(await core.call("commit", n_executions=step.executions), StepStats)
        version = step.version if stats is None else stats.version
        learned = version > step.version  # else nothing was trainable: no optimizer step, no new version
        figures = groups.figures(step, stats, self._config, step_s=self._events.now - self._step_began)
        self._journal.prepare_step(step.number, version, groups.queries, figures)
        if learned and (version % self._config.train.checkpoint_every == 0 or step.number == self._config.steps):
            await core.call("save", folder=str(checkpoints.folder_of(self._run_dir, version)))
        controller.committed(version)  # from here on the step is done, whatever happens to the core
        self._assembler.commit()
        self._step_began = self._events.now
        self._events.emit("step", **figures)
        for query_id in groups.queries:
            self._events.emit("query", query=query_id, state="trained", step=step.number)

    async def _evaluate(self, name: str) -> dict[str, Any] | None:
        return await self._watched(self._parts.evaluation.run(name, self._controller.published.version))

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, or raise what broke meanwhile."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._controller.failure]
        if self._collecting is not None:
            either.append(self._collecting)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for broken in either[1:]:
            if broken.done() and not broken.cancelled():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                broken.result()
        return await task

    def _resume_queries(self) -> None:
        """Take up the queries that an earlier life of this run had admitted and not trained."""
        logged = {event["step"] for event in self._parts.past if event["kind"] == "step"}
        for figures in self._journal.steps():
            if figures["step"] not in logged:  # committed in the last moment of an earlier life
                self._events.emit("step", **figures)
        for row in self._parts.unfinished:
            results = self._journal.results(row.query_id)
            if row.complete:
                self._results[row.query_id] = results
            else:
                number = int(row.query_id[1:])
                attempt = self._parts.life * (self._config.executions.infra_retries + 1)
                task = self._parts.task(row.task_id)
                self._groups.submit(number, task, first_attempt=attempt, done=results)
