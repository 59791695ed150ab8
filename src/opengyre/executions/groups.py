"""Runs queries: each a group of executions, all of them under one limit that may change at any time.

    submit(query) ──> queue: members in order, oldest query first ──(while running < limit)──> run ──> result
                        ^                                                                       │
                        └──────── replacement, in front, up to infra_retries <── INFRA_ABORT ───┤
                                                                                                v
                      next_complete() <── finished, in completion order <── all members of a query have a result

Who waits for what: a member waits for a free place; a place frees when an execution ends or the limit grows. A smaller
limit starts fewer and touches nothing that runs. There is no dispatcher task that could die unseen: whatever changes
the state starts what may start; an error in that is raised by ``next_complete``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opengyre.errors import OpenGyreError, SandboxError, boundary
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.executions.task import Task

Finished = tuple[str, list[ExecutionResult]]


class RunExecution(Protocol):
    """``Runner.run``."""

    async def __call__(self, execution_id: str, query_id: str, task: Task, *, queued_s: float = 0.0) -> ExecutionResult:
        """Run one execution; cancelled, it kills what it started and returns CANCELLED."""
        ...


class OnQueued(Protocol):
    """Told of each execution that enters the queue; ``Runner``'s ``on_state`` fits."""

    def __call__(self, execution_id: str, query_id: str, task: Task, state: str) -> None:
        """``state`` is ``queued``."""
        ...


@dataclass
class _Query:
    """A group under way: ``results`` has one entry per member that is over for good."""

    query_id: str
    task: Task
    size: int
    results: dict[int, ExecutionResult] = field(default_factory=dict)


@dataclass(frozen=True)
class _Member:
    """One place in a group, and which attempt at it this is."""

    query: _Query
    member: int
    attempt: int
    first_attempt: int
    queued_at: float

    @property
    def execution_id(self) -> str:
        return f"{self.query.query_id}-{self.member:02d}-{self.attempt}"


class GroupRunner:
    """Runs groups; knows nothing of cells or training.

    Args:
        run: runs one execution.
        group_size: executions per query.
        infra_retries: replacements of a member lost to infrastructure.
        limit: executions running at once.
        on_waterlevel: called with (queued, running) whenever one of them changed.
        on_queued: told of executions entering the queue.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run: RunExecution,
        *,
        group_size: int,
        infra_retries: int,
        limit: int,
        on_waterlevel: Callable[[int, int], None] = lambda queued, running: None,
        on_queued: OnQueued = lambda execution_id, query_id, task, state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._group_size, self._infra_retries = run, group_size, infra_retries
        self._limit = limit
        self._on_waterlevel, self._on_queued, self._clock = on_waterlevel, on_queued, clock
        self._queue: deque[_Member] = deque()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finished: asyncio.Queue[Finished | Exception] = asyncio.Queue()
        self._open: dict[str, _Query] = {}
        self._broken: Exception | None = None
        self._closing = False
        self._reported = (0, 0)

    @property
    def queued(self) -> int:
        """Executions waiting for a place."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Executions that run."""
        return len(self._running)

    @property
    def waterlevel(self) -> int:
        """Executions queued and running."""
        return self.queued + self.running

    @property
    def limit(self) -> int:
        """Executions that may run at once. Shrinking it leaves those that run alone."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._advance()

    def submit(
        self,
        query: int,
        task: Task,
        *,
        size: int | None = None,
        prefix: str = "q",
        first_attempt: int = 0,
        done: Sequence[ExecutionResult] = (),
    ) -> str:
        """Queue a query behind the others; returns its id ``{prefix}{query:06d}``.

        Args:
            size: members, where not the group size (held-out tasks).
            prefix: of the id.
            first_attempt: a resumed query must not use an execution id twice.
            done: results known from before a resume; their members are not run again.

        Raises:
            OpenGyreError: the query is already under way.
        """
        state = _Query(f"{prefix}{query:06d}", task, size or self._group_size)
        if state.query_id in self._open:
            raise OpenGyreError("is already under way", where=f"query {state.query_id}")
        state.results = {int(result.execution_id.rsplit("-", 2)[1]): result for result in done}
        self._open[state.query_id] = state
        for member in range(state.size):
            if member not in state.results:
                self._enqueue(_Member(state, member, first_attempt, first_attempt, self._clock()))
        self._complete(state)
        self._advance()
        return state.query_id

    async def next_complete(self) -> Finished:
        """The next query whose members are all over, in completion order; results are in member order.

        Raises whatever broke the group runner or a callback: the run must stop with that cause.
        """
        if self._broken is not None:
            raise self._broken
        item = await self._finished.get()
        if isinstance(item, Exception):
            self._finished.put_nowait(item)  # for the next one who waits already
            raise item
        return item

    async def close(self) -> None:
        """Drop the queue, cancel what runs and wait until it is dead. Queries under way stay incomplete."""
        self._closing = True
        self._queue.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._report()

    def _enqueue(self, member: _Member, *, in_front: bool = False) -> None:
        (self._queue.appendleft if in_front else self._queue.append)(member)
        self._on_queued(member.execution_id, member.query.query_id, member.query.task, "queued")

    def _advance(self) -> None:
        """Start what may start, and say how high the water stands."""
        while self._queue and self.running < self._limit and not self._closing:
            member = self._queue.popleft()
            task = asyncio.create_task(self._execute(member), name=member.execution_id)
            self._running[member.execution_id] = task
            task.add_done_callback(lambda task, member=member: self._ended(task, member))  # type: ignore[misc]
        self._report()

    def _report(self) -> None:
        level = (self.queued, self.running)
        if level != self._reported:
            self._reported = level
            self._on_waterlevel(*level)

    async def _execute(self, member: _Member) -> None:
        """One execution; what its runner throws is this execution's failure and nobody else's."""
        query, execution_id = member.query, member.execution_id
        try:
            with boundary(SandboxError, f"execution {execution_id}"):
                queued_s = self._clock() - member.queued_at
                result = await self._run(execution_id, query.query_id, query.task, queued_s=queued_s)
        except OpenGyreError as error:
            result = ExecutionResult(
                execution_id, query.query_id, query.task.task_id, Outcome.INFRA_ABORT, None, detail=str(error)
            )
        replaceable = member.attempt - member.first_attempt < self._infra_retries
        if result.outcome is Outcome.INFRA_ABORT and replaceable and not self._closing:
            next_attempt = member.attempt + 1
            again = _Member(query, member.member, next_attempt, member.first_attempt, self._clock())
            self._enqueue(again, in_front=True)
        elif not self._closing:
            query.results[member.member] = result
            self._complete(query)

    def _complete(self, query: _Query) -> None:
        if len(query.results) == query.size:
            del self._open[query.query_id]
            self._finished.put_nowait((query.query_id, [query.results[m] for m in sorted(query.results)]))

    def _ended(self, task: asyncio.Task[None], member: _Member) -> None:
        """Free the place. An error here, or left by the task, is ours: it ends the run, through ``next_complete``."""
        del self._running[member.execution_id]
        error = None if task.cancelled() else task.exception()
        try:
            self._advance()
        except Exception as cause:  # noqa: BLE001 - the boundary of a callback: nobody above would see it
            error = cause
        if isinstance(error, Exception) and self._broken is None:
            self._broken = error
            self._finished.put_nowait(error)
