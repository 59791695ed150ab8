"""Tasks from folders: one sub-folder a task.

    <path>/hello/task.toml            evaluator = ["python3", "{task}/check.py", "{workspace}", "{reward}"]
    <path>/hello/instruction.md       or the key `instruction`
    <path>/hello/workspace/...        what the agent starts from; executable files stay executable
    <path>/hello/evaluator/...        what the evaluator needs; the agent never sees it

Splits are the sub-folders ``train/`` and ``held_out/`` of ``<path>``, or the key ``split`` (default ``train``).
"""

from __future__ import annotations

import difflib
import os
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from opengyre.errors import TaskError
from opengyre.executions.task import Deadlines, Task

SPLITS = ("train", "held_out")


class TaskFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``task.toml``. The task's id is its folder's name; unset keys take the defaults of ``Task``."""

    evaluator: list[str] = []  # argv; {workspace}, {task} (the evaluator's folder) and {reward} are filled in
    instruction: str = ""  # or the file instruction.md
    split: Literal["train", "held_out"] | None = None  # only where the folders do not say it
    reward_range: tuple[float, float] = (0.0, 1.0)
    deadlines: Deadlines = Deadlines()
    env: dict[str, str] = {}


class FolderTasks:
    """A task set (contract: ``executions.task.TaskSet``) read from ``path``, all of it at once.

    Args:
        path: see above.
        seed: fixes the order of each split.

    Raises:
        TaskError: a task is incomplete or broken; names the task and the key or file.
    """

    def __init__(self, path: Path, *, seed: int = 0) -> None:
        if not path.is_dir():
            raise TaskError("no such folder", where=str(path), right="tasks.path: one sub-folder per task")
        self._path = path
        self._tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
        split_folders = [path / split for split in SPLITS if (path / split).is_dir()]
        for parent in split_folders or [path]:
            for folder in sorted(parent.iterdir()):
                if folder.is_dir() and not folder.name.startswith("."):
                    split, task = read_task(folder)
                    self._add(split or (parent.name if split_folders else "train"), task)
        for split, tasks in self._tasks.items():
            random.Random(f"{split}/{seed}").shuffle(tasks)

    def _add(self, split: str, task: Task) -> None:
        if any(task.task_id == other.task_id for tasks in self._tasks.values() for other in tasks):
            raise TaskError("is there twice", where=f"task {task.task_id}", right="one folder name, one task")
        self._tasks[split].append(task)

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of a split; raises TaskError if there is no such split."""
        if split not in self._tasks:
            raise TaskError(f"unknown split {split!r}", where=str(self._path), right=" or ".join(SPLITS))
        return self._tasks[split]


def read_task(folder: Path) -> tuple[str | None, Task]:
    """The split its file names (None: none) and the task in ``folder``. Raises TaskError naming task and key."""
    where = f"task {folder.name}"
    try:
        data = tomllib.loads((folder / "task.toml").read_text())
    except FileNotFoundError:
        raise TaskError("has no task.toml", where=where) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"task.toml: {error}", where=where, right="TOML") from None
    known = TaskFile.__struct_fields__
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            right = f"did you mean {near[0]}?" if near else "one of " + ", ".join(known)
            raise TaskError(f"task.toml: unknown key {key!r}", where=where, right=right)
    try:
        file = msgspec.convert(data, TaskFile)
    except msgspec.ValidationError as error:
        raise TaskError(f"task.toml: {error}", where=where) from None
    instruction = file.instruction
    if not instruction and (folder / "instruction.md").is_file():
        instruction = (folder / "instruction.md").read_text()
    if not instruction.strip():
        raise TaskError("has no instruction", where=where, right="the key instruction, or the file instruction.md")
    if not file.evaluator:
        raise TaskError("has no evaluator", where=where, right='task.toml: evaluator = ["command", ...]')
    if not file.reward_range[0] < file.reward_range[1]:
        raise TaskError(f"reward_range {list(file.reward_range)}", where=where, right="[low, high], low < high")
    files, executables = _read_files(folder / "workspace", where)
    task = Task(
        task_id=folder.name,
        instruction=instruction,
        files=files,
        evaluator=file.evaluator,
        executables=executables,
        evaluator_files=_read_files(folder / "evaluator", where)[0],
        reward_range=file.reward_range,
        deadlines=file.deadlines,
        env=file.env,
    )
    return file.split, task


def _read_files(folder: Path, where: str) -> tuple[dict[str, str], list[str]]:
    """Relative path -> text, and the paths that are executable."""
    files: dict[str, str] = {}
    executables = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(folder).as_posix()
            try:
                files[name] = path.read_text()
            except UnicodeDecodeError:
                raise TaskError(f"{folder.name}/{name} is not UTF-8 text", where=where) from None
            if os.access(path, os.X_OK):
                executables.append(name)
    return files, executables
