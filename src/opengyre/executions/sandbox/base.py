"""Where an execution lives: its own workspace, its own home, and an end that takes everything it started with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from opengyre.executions.harness.base import Launch


class Exit(msgspec.Struct, frozen=True):
    """How a process ended: exit code (negative: signal), whether the deadline ended it, last lines of its output."""

    code: int | None
    timed_out: bool
    tail: str


class Sandbox(Protocol):
    """One execution's place. ``workspace`` and ``home`` are host paths; ``inner`` maps them to the harness's view."""

    workspace: Path
    home: Path

    def inner(self, path: Path) -> Path:
        """How ``path`` is called inside."""
        ...

    async def run(
        self, launch: Launch, *, timeout_s: float, log: Path, held_s: Callable[[], float] | None = None
    ) -> Exit:
        """Run to the end or to the deadline; then no process it started is alive.

        ``held_s``: seconds so far that do not count against ``timeout_s``, read again when the deadline seems reached.
        Raises HarnessError if the command cannot be executed, SandboxError if the sandbox could not start or was lost
        through no doing of what ran in it.
        """
        ...

    async def close(self, timeout_s: float) -> None:
        """Kill what is left and remove the folders; bounded by ``timeout_s``, then abandoned with a SandboxError."""
        ...
