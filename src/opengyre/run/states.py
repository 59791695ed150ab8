"""What happens whenever an execution changes state: the event log hears of it, and a result becomes durable."""

from __future__ import annotations

from collections.abc import Callable

from opengyre.cells.policies.survival import Survival
from opengyre.errors import OpenGyreError
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.executions.task import Task
from opengyre.run.door import SessionDoor
from opengyre.run.evaluation import PREFIX
from opengyre.run.guard import Guard
from opengyre.run.harvest import Harvest
from opengyre.run.journal import Journal
from opengyre.watch.events import EventLog


class ExecutionStates:
    """Implements executions.runner.OnState."""

    def __init__(
        self,
        events: EventLog,
        journal: Journal,
        harvest: Harvest,
        door: SessionDoor,
        guard: Guard,
        *,
        speed: float = 1.0,  # seconds of the run's clock in one of ours
    ) -> None:
        self._speed = speed
        self._events, self._journal, self._harvest, self._door = events, journal, harvest, door
        self._guard = guard
        self.survival = Survival()  # what policies are told of how long executions take
        self.fail: Callable[[OpenGyreError], None] = lambda error: None  # how a run that cannot work is ended

    def __call__(
        self, execution_id: str, query_id: str, task: Task, state: str, result: ExecutionResult | None = None
    ) -> None:
        """Log the change; a result is journaled first, so that its group can never complete before it is durable."""
        held_out = query_id.startswith(PREFIX)
        about = {"execution": execution_id, "query": query_id, "task": task.task_id}
        about["split"] = "held_out" if held_out else "train"
        if result is None:
            self._events.emit("execution", **about, state=state)
            if not held_out:
                self._begins(execution_id, query_id, state)
            return
        self.survival.ended(execution_id, query_id, self._events.now, counts=result.outcome.scored)
        cancelled = result.outcome is Outcome.CANCELLED  # a resumed run runs it again, under another id
        if not cancelled:
            self._journal.finish(result)
        self._events.emit(
            "execution",
            **about,
            state=state,
            outcome=result.outcome.value,
            reward=result.reward,
            calls=result.calls,
            queued_s=result.queued_s * self._speed,
            boot_s=result.boot_s * self._speed,
            agent_s=result.active_s * self._speed,
            held_s=result.held_s * self._speed,
            score_s=result.score_s * self._speed,
            detail=result.detail[-300:] if result.reward is None else "",
            **(self._harvest.figures(execution_id) if result.calls else {}),
        )
        if not cancelled and self._door.tree(execution_id) is not None:
            self._harvest.note(result)
        if held_out or result.reward is None:
            self._door.forget(execution_id)
        if error := self._guard.finished(result):
            self.fail(error)

    def _begins(self, execution_id: str, query_id: str, state: str) -> None:
        if state == "queued":
            self.survival.queued(execution_id, query_id)
        elif state == "running":
            self.survival.started(execution_id, query_id, self._events.now)
