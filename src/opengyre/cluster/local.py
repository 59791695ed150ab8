"""Cells as processes of this machine, talking over a Unix socket.

    LocalCluster ── one "template" process: imports torch once, holds no model and no device
         │  fork      │
         └────────────┴─▶ cell ─▶ cell ─▶ cell      each starts in a moment and shares the library's memory

A cell that loses its connection ends itself, and the template ends with its pipe, so nothing outlives a killed
conductor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cells.channel import Channel, EventHandler
from opengyre.cluster.base import CellSpec
from opengyre.errors import CellError

_START_DEADLINE_S = 180.0  # importing torch on a loaded two-core machine has taken over a minute
_TAIL_BYTES = 2000


class LocalCell:
    """One cell process. It is the template's child, so its end is seen through a pidfd."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name, self.pid = name, pid
        self._log = log
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._channel: Channel | None = None
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def connected(self, channel: Channel) -> None:
        """The process has called back."""
        self._channel = channel

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the cell. Raises CellError when it is gone, or the cell's own error."""
        if self._channel is None:
            raise CellError(f"is not connected; cannot {op}", where=self.name)
        return await self._channel.call(op, timeout_s=timeout_s, **args)

    def notify(self, op: str, **args: Any) -> None:
        """Tell the cell."""
        if self._channel is not None:
            self._channel.notify(op, **args)

    async def wait(self) -> str:
        """Return when the process has ended, with the last lines of its log."""
        await self._ended.wait()
        return _tail(self._log)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end; kill it after ``grace_s``."""
        self.notify("exit")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self._ended.wait()
        if self._channel is not None:
            await self._channel.close()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()


class LocalCluster:
    """Starts cells by forking a process that has torch imported; logs go to ``log_dir``."""

    def __init__(self, log_dir: Path) -> None:
        self._logs = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="opengyre-"))  # short: a socket path has 107 bytes
        self._cells: list[LocalCell] = []
        self._template: asyncio.subprocess.Process | None = None
        self._forking = asyncio.Lock()

    async def start(self, spec: CellSpec, on_event: EventHandler) -> LocalCell:
        """Start a cell and wait until it answers.

        Raises:
            CellError: it died or did not answer in time; carries the tail of its log.
        """
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result(Channel(reader, writer, peer=spec.name, on_event=on_event))

        address = self._sockets / f"{spec.name}.sock"
        address.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(accept, path=address)
        log = self._logs / f"{spec.name}.log"
        cell: LocalCell | None = None
        try:
            cell = LocalCell(spec.name, await self._fork(address, log), log)
            self._cells.append(cell)
            ended = asyncio.create_task(cell.wait())
            either: list[asyncio.Future[Any]] = [connected, ended]
            await asyncio.wait(either, timeout=_START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not connected.done():
                raise CellError(f"did not start: {_tail(log) or 'no output'}", where=spec.name, right=f"see {log}")
            cell.connected(connected.result())
            await cell.call("init", timeout_s=_START_DEADLINE_S, spec=msgspec.to_builtins(spec))
            return cell
        except BaseException:
            if cell is not None:
                await cell.stop(grace_s=0.0)
            raise
        finally:
            server.close()
            address.unlink(missing_ok=True)

    async def close(self) -> None:
        """End every cell and the template, and remove the sockets."""
        await asyncio.gather(*(cell.stop(grace_s=5.0) for cell in self._cells))
        if self._template is not None and self._template.returncode is None:
            self._template.kill()
            await self._template.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def _fork(self, address: Path, log: Path) -> int:
        """Have the template fork a cell that connects to ``address``; returns its process id."""
        async with self._forking:
            template = self._template
            if template is None or template.returncode is not None:
                template = self._template = await self._start_template()
            assert template.stdin is not None and template.stdout is not None
            template.stdin.write(json.dumps([str(address), str(log)]).encode() + b"\n")
            async with asyncio.timeout(_START_DEADLINE_S):
                line = await template.stdout.readline()
            if not line:
                raise CellError(f"the cells' template process ended: {_tail(self._logs / 'template.log')}")
            return int(line)

    async def _start_template(self) -> asyncio.subprocess.Process:
        with (self._logs / "template.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "opengyre.cells.template",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # Ctrl-C reaches the conductor only, which ends cells in order
            )


def _tail(log: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    return ""
