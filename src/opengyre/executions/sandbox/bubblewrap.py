"""A sandbox of Linux namespaces: sees the system read-only, its own folders at fixed paths, and nothing else of the
host's files or processes. The network is the host's: the proxy is on its loopback."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from opengyre.errors import HarnessError, SandboxError, boundary
from opengyre.executions.harness.base import Launch
from opengyre.executions.sandbox import nursery, warden
from opengyre.executions.sandbox.base import Exit
from opengyre.executions.sandbox.local import LocalSandbox, search_path

PROBE_S = 10.0  # a bwrap that needs longer than that for `true` is of no use

# What programs look up; everything else in /etc (keys, shadow, cloud credentials) stays outside.
ETC = (
    *("alternatives", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf"),
    *("pki", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "ca-certificates"),
    *("ca-certificates.conf", "terminfo", "timezone"),
)
AGENT = 1000  # user id inside: some harnesses refuse to work as root
INNER = {"workspace": "/workspace", "home": "/home/agent", "tmp": "/tmp"}


class BubblewrapSandbox(LocalSandbox):
    """The local sandbox's folders and end, with the host out of sight."""

    def __init__(self, execution_id: str, root: Path, *, keep: bool = False) -> None:
        super().__init__(execution_id, root, keep=keep)
        with boundary(SandboxError, str(self.folder)):
            (self.folder / "passwd").write_text(f"agent:x:{AGENT}:{AGENT}::{INNER['home']}:/bin/sh\n")
            (self.folder / "group").write_text(f"agent:x:{AGENT}:\n")

    def inner(self, path: Path) -> Path:
        """``/workspace``, ``/home/agent`` or ``/tmp`` for what lies in them; other paths are as they are."""
        for name, inside in INNER.items():
            if path.is_relative_to(self.folder / name):
                return Path(inside) / path.relative_to(self.folder / name)
        return path

    def command(self, launch: Launch, log: Path) -> nursery.Command:
        """The launch behind bubblewrap."""
        plain = super().command(launch, log)
        argv = [_bwrap(), *_system()]
        for name, inside in INNER.items():
            argv += ["--bind", str(self.folder / name), inside]
        for name in ("passwd", "group"):
            argv += ["--ro-bind", str(self.folder / name), f"/etc/{name}"]
        argv += _tools(launch.tools, plain.argv[0])  # last, so that no folder above hides them
        argv += ["--chdir", INNER["workspace"], "--json-status-fd", str(warden.STATUS_FD), "--", *plain.argv]
        return msgspec.structs.replace(plain, argv=argv, cwd="/", wrapped=True)

    async def run(
        self, launch: Launch, *, timeout_s: float, log: Path, held_s: Callable[[], float] | None = None
    ) -> Exit:
        """Run to the end or to the deadline. What runs inside cannot reach its warden, nor stop bubblewrap from saying
        that it had started: a missing word is never the policy's doing."""
        report = await nursery.run(self.command(launch, log), timeout_s=timeout_s, held_s=held_s)
        if report.lost:
            raise SandboxError("the warden was killed from outside", where=self._id)
        self._check_gone(report)
        if not report.timed_out and '"exit-code"' not in report.status:  # written only if the command was executed
            kind = HarnessError if "bwrap: execvp" in report.tail else SandboxError
            raise kind(report.tail.strip() or f"bubblewrap ended with {report.code}", where=self._id)
        return Exit(report.code, report.timed_out, report.tail)


@functools.cache
def probe() -> str:
    """Why bubblewrap cannot be used here; empty if it can. Asked once a process."""
    if not (bwrap := shutil.which("bwrap")):
        return "bwrap is not installed"
    try:
        done = subprocess.run([bwrap, *_system(), "--", "/bin/sh", "-c", ":"], capture_output=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap: {error}"
    return (
        done.stderr.decode(errors="replace").strip() or f"bwrap ended with {done.returncode}" if done.returncode else ""
    )


@functools.cache
def _bwrap() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def _system() -> tuple[str, ...]:
    argv = ["--unshare-all", "--share-net", "--die-with-parent", "--uid", str(AGENT), "--gid", str(AGENT)]
    argv += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            argv += ["--ro-bind", name, name]
    for name in ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return tuple(argv)


def _tools(listed: list[str], program: str) -> list[str]:
    """Read-only binds for code: this Python, listed paths, and the installation the program belongs to."""
    shown = [sys.base_prefix, sys.prefix, *listed]
    return [word for path in shown for word in _show(Path(path).absolute())] + _installation(program)


@functools.lru_cache(maxsize=64)
def _installation(program: str) -> list[str]:
    argv: list[str] = []
    found = shutil.which(program, path=search_path())
    for path in dict.fromkeys((Path(found), Path(found).resolve())) if found else ():
        if path.parent.name == "bin" and path.parent.parent not in (Path("/"), Path.home(), Path.home() / ".local"):
            argv += _show(path.parent.parent)  # <prefix>/bin/tool reads <prefix>/lib
        else:
            argv += _show(path)
    return argv


def _show(path: Path) -> list[str]:
    if path.is_relative_to("/usr") or path == Path("/"):
        return []
    return ["--ro-bind-try", os.fspath(path), os.fspath(path)]
