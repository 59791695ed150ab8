"""Starts commands under wardens (see ``warden.py``): the run's side of the control socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from opengyre.errors import HarnessError, SandboxError
from opengyre.executions.sandbox import warden

EXECUTION_MARK, RUN_MARK = "OPENGYRE_EXECUTION", "OPENGYRE_RUN"
RUN_ID = uuid.uuid4().hex  # tells two runs on one machine apart, whose execution ids are the same
START_S = 30.0  # from request to exec; a millisecond in peace, seconds on a machine that swaps
GRACE_S = 2.0  # between SIGTERM and SIGKILL: enough to flush a transcript, short against any deadline
LOG_BYTES = 16 << 20  # an agent that prints for ever must not fill the disk of the others
REPORT_SLACK_S = 5.0  # beyond the warden's own limits, before it is given up


class Command(msgspec.Struct, frozen=True):
    """What a warden is asked to run. ``wrapped``: argv is bubblewrap, which reports on descriptor 3."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdin: str
    log: str
    wrapped: bool = False
    log_bytes: int = LOG_BYTES


class Report(msgspec.Struct, frozen=True):
    """How it ended. ``code`` is None if the end was ours and the process did not exit by itself before it;
    ``lost``: the warden went away without a word."""

    code: int | None = None
    tail: str = ""
    status: str = ""
    stuck: list[int] = []
    timed_out: bool = False
    lost: bool = False


class _Nursery:
    """The one nursery of this process; made when first needed, made again when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._door: socket.socket | None = None
        self._owner = 0

    def open(self) -> socket.socket:
        """A control socket with a fresh warden at its other end."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for attempt in (1, 2):
                if self._door is None or self._owner != os.getpid():  # a forked child needs its own
                    self._door, self._owner = self._start(), os.getpid()
                try:
                    socket.send_fds(self._door, [b"w"], [theirs.fileno()])
                    return ours
                except OSError as cause:
                    self._door.close()
                    self._door = None
                    if attempt == 2:
                        ours.close()
                        raise SandboxError(f"cannot start a warden: {cause}") from cause
        raise AssertionError("unreachable")

    @staticmethod
    def _start() -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-I", "-S", warden.__file__, str(theirs.fileno()), str(os.getpid())]
            env = {"PATH": os.defpath}
            keep = [theirs.fileno()]
            process = subprocess.Popen(argv, pass_fds=keep, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
        process.returncode = 0  # it ends with us, not before: nothing to wait for
        return ours


_nursery = _Nursery()


async def run(command: Command, *, timeout_s: float, held_s: Callable[[], float] | None = None) -> Report:
    """Run to the end or to the deadline; afterwards nothing it started is alive.

    Args:
        command: what to run.
        timeout_s: seconds; time counted by ``held_s`` does not count.
        held_s: seconds so far that do not count, read again whenever the deadline seems reached.

    Raises:
        HarnessError: the command could not be executed.
        SandboxError: no warden could be started.
    """
    begin = asyncio.ensure_future(_begin(command))
    try:
        reader, writer, first = await asyncio.shield(begin)
    except asyncio.CancelledError:
        reader, writer, _ = await begin  # milliseconds; only a started command can be ended with proof
        await _end(reader, writer, grace_s=0.0)
        writer.close()
        raise
    try:
        if "error" in first:
            kind = HarnessError if first["error"].startswith(warden.ExecError.__name__) else SandboxError
            raise kind(first["error"], where=command.argv[0])
        line = await _until(reader, timeout_s, held_s or (lambda: 0.0))
        timed_out = line is None
        return _report(await _end(reader, writer) if line is None else line, timed_out)
    except asyncio.CancelledError:
        await asyncio.shield(_end(reader, writer, grace_s=0.0))
        raise
    finally:
        writer.close()


def _report(line: bytes, timed_out: bool) -> Report:
    if not line.endswith(b"\n"):
        return Report(lost=True, timed_out=timed_out)
    return msgspec.structs.replace(msgspec.json.decode(line, type=Report), timed_out=timed_out)


async def _begin(command: Command) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, str]]:
    """Hand the command to a warden; once more if the nursery died under it."""
    for _ in range(2):
        reader, writer = await asyncio.open_unix_connection(sock=_nursery.open(), limit=1 << 20)
        try:
            writer.write(msgspec.json.encode(command) + b"\n")
            line = await asyncio.wait_for(reader.readline(), START_S)
        except TimeoutError:
            writer.close()
            raise SandboxError(f"nothing started within {START_S:.0f} s", where=command.argv[0]) from None
        except (OSError, asyncio.CancelledError) as cause:
            writer.close()
            if isinstance(cause, asyncio.CancelledError):
                raise
            continue
        if line:
            return reader, writer, msgspec.json.decode(line)
        writer.close()
    raise SandboxError("the warden died before it started anything", where=command.argv[0])


async def _until(reader: asyncio.StreamReader, timeout_s: float, held_s: Callable[[], float]) -> bytes | None:
    """The report (empty if the warden was lost), or None when the deadline, extended by the time held, is over."""
    clock = asyncio.get_running_loop().time
    started, report = clock(), asyncio.ensure_future(reader.readline())
    try:
        while (left := timeout_s + held_s() - (clock() - started)) > 0:
            if (await asyncio.wait({report}, timeout=left))[0]:
                return report.result()
        return report.result() if report.done() else None  # it may have come in the very moment of the deadline
    except OSError:
        return b""
    finally:
        report.cancel()  # a cancelled readline leaves what it has seen in the buffer


async def _end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, grace_s: float | None = None) -> bytes:
    """Ask for the end and wait for the proof."""
    grace_s = GRACE_S if grace_s is None else grace_s
    try:
        writer.write(msgspec.json.encode({"end": grace_s}) + b"\n")
        return await asyncio.wait_for(reader.readline(), grace_s + warden.STUCK_S + REPORT_SLACK_S)
    except (OSError, TimeoutError):
        return b""


def marked(execution_id: str) -> Iterator[int]:
    """Processes of this run whose environment carries the execution's marks."""
    marks = {f"{EXECUTION_MARK}={execution_id}".encode(), f"{RUN_MARK}={RUN_ID}".encode()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if marks <= set(environ.split(b"\0")):
                yield int(entry.name)


def kill_marked(execution_id: str) -> None:
    """SIGKILL every process that carries the execution's marks and all their descendants, until none is found."""
    for _ in range(100):  # a fork bomb may need several rounds; a process stuck in the kernel must not hold us
        pids = list(marked(execution_id))
        if not pids:
            return
        for pid in [*pids, *(child for parent in pids for child in warden.descendants(parent))]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
