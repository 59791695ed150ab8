"""Which tasks a config means."""

from __future__ import annotations

import importlib
from pathlib import Path

from opengyre.config import TasksConfig
from opengyre.errors import ConfigError, TaskError, boundary
from opengyre.executions.task import TaskSet
from opengyre.executions.tasks_folder import FolderTasks


def make_tasks(config: TasksConfig) -> TaskSet:
    """The task set for ``tasks.kind``: ``quickstart``, ``folder``, or a ``module:function`` called with the config.

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
    module, colon, name = config.kind.partition(":")
    if not colon:
        raise ConfigError(f"{config.kind!r}", where="tasks.kind", right="quickstart, folder or module:function")
    with boundary(ConfigError, f"tasks.kind {config.kind}"):
        function = getattr(importlib.import_module(module), name)
    with boundary(TaskError, f"tasks.kind {config.kind}"):
        made: TaskSet = function(config)
        return made
