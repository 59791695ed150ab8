"""Nothing outlives its execution, nothing outlives its run: the processes between us and a harness.

    run ──socket──> nursery ──fork──> warden ──fork, exec──> harness ──> whatever it starts
     │                (one a run)       │ (one an execution)
     └────── control socket ────────────┘

The nursery is a small interpreter without site-packages: forking it costs a millisecond whatever the size of the run,
and is safe whatever threads the run has. A warden is a *subreaper*: processes that double-fork, call setsid or wipe
their environment are re-parented to it, so "no child left" (ECHILD) proves the execution is gone. A warden waits for:
its harness to exit, an ``end`` line, the control socket to close, or the run to die (a pidfd, so a descriptor leaked
into another process cannot hide it); each of them unblocks it into the same end: SIGTERM and a grace if asked, SIGKILL,
ECHILD, report. If a warden is killed the kernel kills its harness (PDEATHSIG), the rest falls to the nursery (a
subreaper too) and the run finds it by the marker in its environment.

Standard library only: this file is run by path with ``python -I -S``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

TAIL_BYTES = 4096  # of the output, reported: a traceback and what led to it
STATUS_FD = 3  # first free descriptor after stdio; bubblewrap writes its status there
STUCK_S = 10.0  # a process that survives SIGKILL for so long hangs in the kernel: reported, not waited for
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>

_prctl = ctypes.CDLL(None, use_errno=True).prctl  # resolved before any fork


def nursery(door: socket.socket, run_pid: int) -> None:
    """Fork one warden for each descriptor that arrives at ``door``; when the run is gone, end everything."""
    run = os.pidfd_open(run_pid)
    if os.getppid() != run_pid:  # it died before the pidfd was taken, which may name a stranger
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)  # SIGCHLD ignored: wardens are reaped by the kernel
    poll = select.poll()
    poll.register(door, select.POLLIN)
    poll.register(run, select.POLLIN)
    while run not in {fd for fd, _ in poll.poll()}:
        data, fds, _, _ = socket.recv_fds(door, 1, 1)
        if not data:
            break
        for fd in fds:
            if os.fork() == 0:
                door.close()
                try:
                    Warden(socket.socket(fileno=fd), run).watch()
                finally:
                    os._exit(0)
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    time.sleep(0.2)  # wardens see the same death and end their executions themselves; this is for what lost its warden
    exterminate(time.monotonic() + STUCK_S)


class ExecError(Exception):
    """The command itself cannot be executed; by its name the run tells it from trouble around it."""


class Warden:
    """Runs one command and ends it with everything it started."""

    def __init__(self, control: socket.socket, run: int) -> None:
        self._control, self._run = control, run
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up descriptor is written
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._child = 0
        self._code: int | None = None
        self._tail = b""
        self._left = 0  # bytes the log may still take

    def watch(self) -> None:
        """Start, wait, end, report."""
        request = self._request()
        if request is None:
            return
        self._left = request["log_bytes"]
        self._log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self._out, out = os.pipe()
        os.set_blocking(self._out, False)
        status, status_write = os.pipe()
        error = self._start(request, out, status_write)
        os.close(out)
        os.close(status_write)
        if error:
            self._say(error=error)
            return
        self._say(started=self._child)
        grace_s = self._wait()
        if grace_s and self._code is None:
            self._ask(grace_s, spare_child=request["wrapped"])
        stuck = exterminate(time.monotonic() + STUCK_S, self._reap)
        self._drain()
        os.set_blocking(status, False)
        try:
            said = os.read(status, TAIL_BYTES).decode(errors="replace")
        except BlockingIOError:
            said = ""
        self._say(code=self._code, tail=self._tail.decode(errors="replace"), status=said, stuck=stuck)

    def _request(self) -> dict[str, Any] | None:
        line = self._control.makefile("rb").readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def _say(self, **what: Any) -> None:
        with contextlib.suppress(OSError):  # nobody is left to tell
            self._control.sendall(json.dumps(what).encode() + b"\n")

    def _start(self, request: dict[str, Any], out: int, status: int) -> str:
        """Fork and exec; returns why it could not, or nothing."""
        stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(request["stdin"].encode(errors="surrogateescape"))
        os.lseek(stdin, 0, os.SEEK_SET)
        failed, fail = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                _become(request, stdin, out, status, fail)
            except BaseException as cause:  # noqa: BLE001 - the boundary between fork and exec: nothing may return
                os.write(fail, f"{type(cause).__name__}: {cause}".encode())
            finally:
                os._exit(127)
        os.close(fail)
        os.close(stdin)
        with os.fdopen(failed, "rb") as reader:
            return reader.read().decode(errors="replace")

    def _wait(self) -> float:
        """Until the harness is gone or the end is asked for; returns the grace in seconds."""
        poll = select.poll()
        for fd in (self._control.fileno(), self._run, self._wake, self._out):
            poll.register(fd, select.POLLIN)
        while self._code is None:
            ready = {fd for fd, _ in poll.poll()}
            if self._run in ready:
                return 0.0
            if self._control.fileno() in ready:
                line = self._control.recv(4096)
                return float(json.loads(line)["end"]) if line else 0.0
            if self._out in ready and not self._drain():
                poll.unregister(self._out)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
        return 0.0

    def _ask(self, grace_s: float, *, spare_child: bool) -> None:
        """SIGTERM to all, then wait until the harness has gone or the grace is over."""
        for pid in descendants():
            if not (spare_child and pid == self._child):  # bubblewrap would take the whole sandbox with it at once
                _kill(pid, signal.SIGTERM)
        poll = select.poll()
        for fd in (self._run, self._wake, self._out):
            poll.register(fd, select.POLLIN)
        until = time.monotonic() + grace_s
        while self._code is None and (left := until - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(left * 1000)}
            if self._run in ready:
                return
            if self._out in ready and not self._drain():
                poll.unregister(self._out)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()

    def _reap(self) -> bool:
        """Collect the dead; False when no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._child:
                    self._code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def _drain(self) -> bool:
        """Move output into the log (up to its cap) and the tail; False at its end."""
        try:
            while data := os.read(self._out, 65536):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                try:
                    os.write(self._log, data[: self._left])
                except OSError:
                    self._left = 0  # a full disk costs the log, not the execution
                self._left = max(0, self._left - len(data))
        except BlockingIOError:
            return True
        return False


def _become(request: dict[str, Any], stdin: int, out: int, status: int, fail: int) -> None:
    """Turn this fork into the harness: own session, dies with its warden, first choice of the OOM killer."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - no pathlib here: it costs 5 ms to import
            file.write("500")  # memory the agent wasted is taken from the agent, not from the run
    except OSError:
        pass
    os.chdir(request["cwd"])
    for source, target in ((stdin, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    if request["wrapped"]:
        if fail == STATUS_FD:
            fail = os.dup(fail)
        os.dup2(status, STATUS_FD)
        os.set_inheritable(STATUS_FD, True)  # dup2 onto itself would leave it close-on-exec
    try:
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except (OSError, ValueError) as cause:
        raise ExecError(str(cause)) from cause


def descendants(root: int | None = None) -> list[int]:
    """All live descendants of ``root`` (this process), parents first."""
    found, todo = [], [root or os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                    children = [int(child) for child in file.read().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def exterminate(until: float, reap: Any = None) -> list[int]:
    """SIGKILL all descendants, again and again, until the kernel says no child is left; returns those that are stuck.

    Stopped first, so that a fork bomb cannot outrun the killing.
    """
    while True:
        pids = descendants()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                _kill(pid, number)
        if not (reap or _reap_all)():
            return []
        if time.monotonic() > until:
            return pids
        time.sleep(0.001)  # long enough for the kernel to take a process down, short against anything we wait for


def _reap_all() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
