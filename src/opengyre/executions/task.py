"""One problem: instruction, workspace, evaluator, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from opengyre.errors import TaskError


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds allowed for each phase. The agent's clock does not run while we hold its request."""

    boot_s: float = 60.0
    agent_s: float = 3600.0
    evaluator_s: float = 600.0
    cleanup_s: float = 30.0  # a sandbox that cannot be removed by then is abandoned and reported


class Task(msgspec.Struct, frozen=True):
    """A problem to be solved in a workspace.

    Args:
        task_id: stable name, unique in its set.
        instruction: what the harness is told.
        files: workspace-relative path -> content, written before the harness starts; a path may be executable
            (listed in ``executables``).
        evaluator: argv run after the harness has ended. ``{workspace}``, ``{task}`` and ``{reward}`` are filled in; the
            evaluator writes JSON ``{"reward": float, "checks": {name: float}}`` to ``{reward}``.
        evaluator_files: files the evaluator needs, put outside the workspace only after the harness has ended.
        reward_range: a value outside it is an evaluator failure.
        deadlines: per phase.
    """

    task_id: str
    instruction: str
    files: dict[str, str]
    evaluator: list[str]
    executables: list[str] = []
    evaluator_files: dict[str, str] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    deadlines: Deadlines = Deadlines()
    env: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise TaskError("has an empty instruction", where=f"task {self.task_id}")
        if not self.evaluator:
            raise TaskError("has no evaluator", where=f"task {self.task_id}", right="an evaluator command")
        for path in [*self.files, *self.evaluator_files]:
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise TaskError(f"file {path!r} leaves its folder", where=f"task {self.task_id}")


class TaskSet(Protocol):
    """Where tasks come from. Splits are ``train`` and ``held_out``; the order is fixed by the seed."""

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split. Raises TaskError on an incomplete task, naming it."""
        ...
