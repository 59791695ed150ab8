"""Runs one execution from an empty folder to a result.

    boot ────> open session ────> harness ──── model calls ───> door (the proxy)
    (boot_s)                         │  exit, or deadline = agent_s + time held by us
                                     v
    result <── settled <── score <── close session <── everything it started is dead
      (all calls recorded)  (evaluator_s, per try)        (then late calls find no session)

Who waits for what: each arrow has its own deadline, so an execution always ends. Its outcome is decided by who can
cause the end: only what the policy cannot provoke goes without a reward. A bad execution is a result, never an
exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from opengyre.config import RunConfig
from opengyre.errors import EvaluatorError, HarnessError, OpenGyreError, SandboxError, boundary
from opengyre.executions.evaluate import Evaluation, evaluate, write_files
from opengyre.executions.harness.base import Harness
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.executions.sandbox.base import Sandbox
from opengyre.executions.sandbox.registry import MakeSandbox, make_sandbox, resolve_kind
from opengyre.executions.task import Task

MODEL_NAME = "opengyre"  # what harnesses ask for; the proxy serves the one policy under any name


class Door(Protocol):
    """The proxy as an execution sees it."""

    def open(self, execution_id: str) -> tuple[str, str]:
        """Open the execution's session: base URL (with its path prefix) and key."""
        ...

    def close(self, execution_id: str) -> None:
        """End the session: calls in flight are stopped, late ones are refused. Closing one
        that is not open does nothing."""
        ...

    async def settled(self, execution_id: str) -> None:
        """Wait until the stopped calls of a closed session are recorded: what was said in it is final then."""
        ...

    def held_s(self, execution_id: str) -> float:
        """Seconds so far in which a call of the execution waited for us (paused engine, switching cell)."""
        ...

    def calls(self, execution_id: str) -> int:
        """Model calls that reached the door, answered or not."""
        ...


class OnState(Protocol):
    """Told of each state: ``queued`` (by the group runner), ``running``, ``scoring``, ``done`` (with the result)."""

    def __call__(
        self, execution_id: str, query_id: str, task: Task, state: str, result: ExecutionResult | None = None
    ) -> None:
        """Must not block."""
        ...


class _Facts(msgspec.Struct):
    """What the phases found out so far; the fields are ExecutionResult's."""

    boot_s: float = 0.0
    active_s: float = 0.0
    held_s: float = 0.0
    score_s: float = 0.0
    calls: int = 0
    exit_code: int | None = None
    reward: float | None = None
    checks: dict[str, float] = {}
    tampered: bool = False
    detail: str = ""


class Runner:
    """Runs executions; knows the door and the harness, nothing of queries, cells or training.

    Args:
        config: the run.
        harness: how the harness is started.
        door: the proxy.
        root: folder of the executions: ``<execution_id>/`` while they live, ``logs/<execution_id>.log`` for good.
        on_state: told of every change of state.
        make: makes sandboxes.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the sandbox asked for does not work here.
    """

    def __init__(
        self,
        config: RunConfig,
        harness: Harness,
        door: Door,
        root: Path,
        on_state: OnState,
        *,
        make: MakeSandbox = make_sandbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._limits = config, config.executions
        self._harness, self._door, self._on_state = harness, door, on_state
        self._make, self._clock = make, clock
        self._kind = resolve_kind(config.sandbox.kind)
        self._model = str(config.harness.options.get("model", MODEL_NAME))
        self._root, self._logs = root, root / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    async def run(self, execution_id: str, query_id: str, task: Task, *, queued_s: float = 0.0) -> ExecutionResult:
        """Run ``task`` once. Never raises for what happens in an execution; a cancelled one returns CANCELLED after
        everything it started is dead."""
        facts, place = _Facts(), _Place()
        self._on_state(execution_id, query_id, task, "running")
        try:
            with boundary(SandboxError, f"execution {execution_id}"):
                outcome = await self._phases(execution_id, query_id, task, facts, place)
        except asyncio.CancelledError:
            outcome, facts.detail = Outcome.CANCELLED, "cancelled"
            if current := asyncio.current_task():
                current.uncancel()  # answered by the result
        except HarnessError as error:
            outcome, facts.detail = Outcome.HARNESS_FAILED, str(error)
        except EvaluatorError as error:
            outcome, facts.detail = Outcome.EVALUATOR_FAILED, str(error)
        except OpenGyreError as error:  # the sandbox, the door: nothing the policy can reach
            outcome, facts.detail = Outcome.INFRA_ABORT, str(error)
        self._door.close(execution_id)
        await self._door.settled(execution_id)
        await self._clean(place, task, facts)
        if not outcome.scored:
            facts.reward = None
        result = ExecutionResult(
            execution_id, query_id, task.task_id, outcome, queued_s=queued_s, **msgspec.structs.asdict(facts)
        )
        self._on_state(execution_id, query_id, task, "done", result)
        return result

    async def _phases(self, execution_id: str, query_id: str, task: Task, facts: _Facts, place: _Place) -> Outcome:
        """Boot, act, score. Raises the typed error of the phase that failed."""
        started = self._clock()
        place.sandbox = sandbox = await self._boot(execution_id, task)
        facts.boot_s = self._clock() - started

        timed_out = await self._act(execution_id, task, sandbox, facts)
        self._door.close(execution_id)
        if facts.calls == 0:
            how = "made no model call before its deadline" if timed_out else "ended before its first model call"
            raise HarnessError(f"{how} (exit code {facts.exit_code}): {facts.detail}", where=self._harness.name)

        self._on_state(execution_id, query_id, task, "scoring")
        started = self._clock()
        try:
            evaluation = await self._score(execution_id, task, sandbox)
        finally:
            facts.score_s = self._clock() - started
        facts.reward, facts.checks, facts.tampered = evaluation.reward, evaluation.checks, evaluation.tampered
        return Outcome.TIMED_OUT if timed_out else Outcome.FINISHED

    async def _boot(self, execution_id: str, task: Task) -> Sandbox:
        def make() -> Sandbox:
            sandbox = self._make(self._kind, execution_id, self._root, keep=self._config.sandbox.keep_workspaces)
            write_files(sandbox.workspace, task.files, task.executables)
            return sandbox

        try:
            return await asyncio.wait_for(asyncio.to_thread(make), task.deadlines.boot_s)
        except TimeoutError:
            raise SandboxError(f"not ready within {task.deadlines.boot_s:g} s", where=execution_id) from None

    async def _act(self, execution_id: str, task: Task, sandbox: Sandbox, facts: _Facts) -> bool:
        """Let the harness work; True if its deadline ended it."""
        base_url, key = self._door.open(execution_id)
        launch = self._harness.launch(
            base_url=base_url,
            key=key,
            instruction=task.instruction,
            workspace=sandbox.inner(sandbox.workspace),
            home=sandbox.inner(sandbox.home),
            model=self._model,
        )
        launch = msgspec.structs.replace(launch, env=task.env | launch.env)
        started = self._clock()
        try:
            end = await sandbox.run(
                launch,
                timeout_s=_smaller(self._limits.agent_deadline_s, task.deadlines.agent_s),
                log=self._logs / f"{execution_id}.log",
                held_s=lambda: self._door.held_s(execution_id),
            )
        finally:
            facts.active_s = self._clock() - started
            facts.held_s, facts.calls = self._door.held_s(execution_id), self._door.calls(execution_id)
        facts.exit_code, facts.detail = end.code, end.tail
        return end.timed_out

    async def _score(self, execution_id: str, task: Task, sandbox: Sandbox) -> Evaluation:
        return await evaluate(
            task,
            sandbox.workspace,
            make=lambda name: self._make(self._kind, name, self._root),
            execution_id=execution_id,
            log=self._logs / f"{execution_id}-score.log",
            deadline_s=_smaller(self._limits.evaluator_deadline_s, task.deadlines.evaluator_s),
            retries=self._limits.evaluator_retries,
        )

    async def _clean(self, place: _Place, task: Task, facts: _Facts) -> None:
        """Remove what is left, within bounds; a folder that cannot be removed is reported, not waited for."""
        if place.sandbox is None:
            return
        try:
            await place.sandbox.close(task.deadlines.cleanup_s)
        except SandboxError as error:
            facts.detail += f"\n[{error}]"


class _Place:
    """Where the sandbox is found for cleaning, whatever phase was interrupted."""

    sandbox: Sandbox | None = None


def _smaller(limit: float | None, own: float) -> float:
    return own if limit is None else min(limit, own)
