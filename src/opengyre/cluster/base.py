"""Where cells live: something that can start a cell and hand back a channel to it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from opengyre.cells.channel import EventHandler


class CellSpec(msgspec.Struct, frozen=True):
    """What a cell process is told at start. ``cpu`` pins it to one core, or None."""

    name: str
    core: bool
    run_id: str
    config: dict[str, Any]  # the resolved RunConfig as plain data
    model_path: str
    cpu: int | None = None


class CellProcess(Protocol):
    """A running cell: its channel, and its end."""

    name: str
    pid: int

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the cell. Raises CellError when it is gone, or the cell's own error."""
        ...

    def notify(self, op: str, **args: Any) -> None:
        """Tell the cell."""
        ...

    async def wait(self) -> str:
        """Return when the cell has ended, with the last lines of its log."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, then end it."""
        ...


class Cluster(Protocol):
    """Starts cells."""

    async def start(self, spec: CellSpec, on_event: EventHandler) -> CellProcess:
        """Start a cell and wait until it answers. Raises CellError with the log's tail when it dies first."""
        ...

    async def close(self) -> None:
        """End every cell."""
        ...
