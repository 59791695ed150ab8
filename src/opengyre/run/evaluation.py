"""Held-out evaluation: the same harness, proxy and cells as training; nothing of it is ever trained."""

from __future__ import annotations

import asyncio
from typing import Any

from opengyre.config import EvalConfig
from opengyre.executions.groups import GroupRunner
from opengyre.executions.outcome import ExecutionResult
from opengyre.executions.task import Task
from opengyre.run.journal import Journal
from opengyre.watch.events import EventLog

PREFIX = "h"  # of held-out query ids; training queries start with q


class Evaluation:
    """Runs every held-out task ``executions`` times and reports the share that passed."""

    def __init__(
        self, config: EvalConfig, tasks: list[Task], groups: GroupRunner, journal: Journal, events: EventLog
    ) -> None:
        self._config, self._tasks, self._groups = config, tasks, groups
        self._journal, self._events = journal, events
        self._round = int(journal.get("evaluation_round") or 0)

    async def run(self, name: str, version: int) -> dict[str, Any] | None:
        """Evaluate once per ``name``: a resumed run takes the figures from the journal. None if there is nothing to do.

        Executions without a reward (evaluator or infrastructure failure) leave the figures, as they leave training.
        """
        if not self._tasks or self._config.every < 0:
            return None
        if known := self._journal.evaluation(name):
            return known
        base = self._round * len(self._tasks)
        self._round += 1
        self._journal.put("evaluation_round", str(self._round))  # a killed round's execution ids are not used again
        for number, task in enumerate(self._tasks):
            self._groups.submit(base + number, task, size=self._config.executions, prefix=PREFIX)
        results: list[ExecutionResult] = []
        for _ in self._tasks:
            results += (await self._groups.next_complete())[1]
        figures = self._figures(name, version, [r.reward for r in results if r.reward is not None])
        self._journal.evaluated(name, figures)
        self._events.emit("eval", **figures)
        return figures

    def _figures(self, name: str, version: int, rewards: list[float]) -> dict[str, Any]:
        passed = sum(reward >= self._config.pass_threshold for reward in rewards)
        return {
            "name": name,
            "version": version,
            "tasks": len(self._tasks),
            "executions": len(rewards),
            "passed": passed,
            "pass_rate": passed / len(rewards) if rewards else None,
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        }

    async def close(self) -> None:
        """Cancel what runs."""
        await asyncio.shield(self._groups.close())
