"""Which tasks a config means."""

from __future__ import annotations

from pathlib import Path

from opengyre import named
from opengyre.config import TasksConfig
from opengyre.errors import ConfigError, TaskError, boundary
from opengyre.executions.task import TaskSet
from opengyre.executions.tasks_folder import FolderTasks


def make_tasks(config: TasksConfig) -> TaskSet:
    """The task set for ``tasks.kind``: ``quickstart``, ``folder``, or a function called with the config, by name.

    Raises:
        ConfigError: unknown kind, missing path, no such function.
        TaskError: the tasks themselves are incomplete.
    """
    if config.kind == "quickstart":
        from opengyre.quickstart.tasks import QuickstartTasks

        return QuickstartTasks(config.train, config.held_out, config.seed, config.options)
    if config.kind == "folder":
        if config.path is None:
            raise ConfigError("is not set", where="tasks.path", right="a folder with one sub-folder per task")
        return FolderTasks(Path(config.path), seed=config.seed)
    if ":" not in config.kind:
        raise ConfigError(f"{config.kind!r}", where="tasks.kind", right=f"quickstart, folder, {named.RIGHT}")
    function = named.load(config.kind, "tasks.kind")
    with boundary(TaskError, f"tasks.kind {config.kind}"):
        made: TaskSet = function(config)
        return made
