"""Cells as processes of this machine, talking over a Unix socket.

A cell that loses its connection ends itself, so nothing outlives a killed conductor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
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
    """One cell process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, channel: Channel, log: Path) -> None:
        self.name, self.pid = name, process.pid
        self._process, self._channel, self._log = process, channel, log

    async def call(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """Ask the cell. Raises CellError when it is gone, or the cell's own error."""
        return await self._channel.call(op, timeout_s=timeout_s, **args)

    def notify(self, op: str, **args: Any) -> None:
        """Tell the cell."""
        self._channel.notify(op, **args)

    async def wait(self) -> str:
        """Return when the process has ended, with the last lines of its log."""
        await self._process.wait()
        await self._channel.close()
        return _tail(self._log)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end; kill it after ``grace_s``."""
        self._channel.notify("exit")
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._channel.close()


class LocalCluster:
    """Starts cells as child processes; logs go to ``log_dir``."""

    def __init__(self, log_dir: Path) -> None:
        self._logs = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="opengyre-"))  # short: a socket path has 107 bytes
        self._cells: list[LocalCell] = []

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
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "opengyre.cells.worker",
                str(address),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,  # Ctrl-C reaches the conductor only, which ends cells in order
            )
        ended = asyncio.create_task(process.wait())
        either: list[asyncio.Future[Any]] = [connected, ended]
        try:
            await asyncio.wait(either, timeout=_START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise CellError(f"did not start: {_tail(log) or 'no output'}", where=spec.name, right=f"see {log}")
            cell = LocalCell(spec.name, process, connected.result(), log)
            self._cells.append(cell)
            await cell.call("init", timeout_s=_START_DEADLINE_S, spec=msgspec.to_builtins(spec))
            return cell
        except BaseException:
            if process.returncode is None:
                process.kill()
            await ended
            raise
        finally:
            ended.cancel()
            server.close()
            address.unlink(missing_ok=True)

    async def close(self) -> None:
        """End every cell and remove the sockets."""
        await asyncio.gather(*(cell.stop(grace_s=5.0) for cell in self._cells))
        shutil.rmtree(self._sockets, ignore_errors=True)


def _tail(log: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
    return ""
