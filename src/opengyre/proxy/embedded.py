"""The embedded engine behind a proxy of its own: one cell process that only ever serves rollouts.

start ──▶ fork a cell ──▶ load ──▶ resume ──▶ router.add
              ▲                                   │ the process ends
              └──── after a pause ── router.remove, its calls wait for the next one
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cells.engine import CellEngine
from opengyre.cluster.base import CellSpec
from opengyre.cluster.local import LocalCluster
from opengyre.config import RunConfig
from opengyre.errors import OpenGyreError
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.router import Router
from opengyre.rollout.base import REGIONS
from opengyre.transfer.base import Ref
from opengyre.transfer.shared_memory import SharedMemoryTransfer

NAME = "embedded"
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 30.0  # between two starts: a model that cannot be loaded is not tried all the time


class Embedded:
    """A served model folder. Implements ``proxy.admin.Engines``.

    Args:
        config: its ``model``, ``sampling`` and ``cells`` tables say what is served and how.
        model: the folder.
        logs: where the process writes.
        say: told, in a line, when the process comes or goes.
    """

    def __init__(self, config: RunConfig, model: Path, logs: Path, router: Router, say: Callable[[str], None]) -> None:
        self._config, self._model, self._logs = config, model, logs
        self._router, self._say = router, say
        self._engine = CellEngine(NAME)
        self._cluster: LocalCluster | None = None
        self._transfer: SharedMemoryTransfer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._why = "starts"

    async def start(self) -> None:
        """Serve. Raises CellError when the model cannot be loaded."""
        run_id = f"{os.getpid()}-proxy"
        self._transfer = SharedMemoryTransfer(run_id)
        self._cluster = LocalCluster(self._logs)
        spec = CellSpec(NAME, False, run_id, msgspec.to_builtins(self._config), str(self._model))
        process = await self._serve(spec)
        self._watch = asyncio.create_task(self._keep(spec, process), name="embedded engine")

    async def close(self) -> None:
        """End the process."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._router.remove(NAME)
        if self._cluster is not None:
            await self._cluster.close()
        if self._transfer is not None:
            self._transfer.close()

    def status(self) -> list[dict[str, Any]]:
        """What is known of it."""
        up = NAME in self._router.engines
        known = {"name": NAME, "url": None, "kind": "embedded", "state": "up" if up else "down", "why": self._why}
        return [known | {"running": len(self._router.running(NAME)), "version": 0, "notes": []}]

    def tell_version(self, version: int) -> None:
        """Its weights never change."""
        what = f"version: {version}; the embedded engine serves the weights of its folder, version 0"
        raise Refusal(what, status=409, param="version")

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _serve(self, spec: CellSpec) -> Any:
        assert self._cluster is not None and self._transfer is not None
        process = await self._cluster.start(spec, self._engine.on_event)
        self._engine.attach(process)
        # An engine serves only weights it was told of; publishing tells it that those it loaded are current.
        published = msgspec.convert(await process.call("publish", key=f"weights-{process.pid}"), Ref)
        self._transfer.drop(published.key)
        await process.call("resume", regions=list(REGIONS))
        self._why = f"serves {self._model.name}"
        self._router.add(self._engine, self._config.cells.slots)
        return process

    async def _keep(self, spec: CellSpec, process: Any) -> None:
        pause_s = PAUSE_FIRST_S
        while True:
            self._why = f"ended: {(await process.wait()) or 'no output'}"
            self._router.remove(NAME)
            self._engine.detach(self._why)
            self._say(f"the embedded engine {self._why}")
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                with contextlib.suppress(OpenGyreError):
                    process = await self._serve(spec)
                    pause_s = PAUSE_FIRST_S
                    self._say("the embedded engine is up again")
                    break
