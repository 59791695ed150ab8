"""A sandbox of plain processes: own folders, own home, clean environment, one certain end. It hides nothing of the
host; use bubblewrap where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opengyre.errors import SandboxError, boundary
from opengyre.executions.harness.base import Launch
from opengyre.executions.sandbox import nursery, warden
from opengyre.executions.sandbox.base import Exit

# Where tools keep state they must not share: two of them on one home corrupt it, or lock each other out.
HOME_FOLDERS = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_CACHE_HOME": ".cache",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "CLAUDE_CONFIG_DIR": ".claude",
    "CODEX_HOME": ".codex",
}


class LocalSandbox:
    """``<root>/<execution_id>/{workspace,home,tmp}`` and processes that cannot outlive it.

    Args:
        execution_id: names the folder and marks every process.
        root: where executions live; made if absent.
        keep: leave the workspace on ``close``.
    """

    def __init__(self, execution_id: str, root: Path, *, keep: bool = False) -> None:
        self._id, self._keep = execution_id, keep
        self.folder = root.resolve() / execution_id
        self.workspace, self.home, self.tmp = (self.folder / name for name in ("workspace", "home", "tmp"))
        with boundary(SandboxError, str(self.folder)):
            root.mkdir(parents=True, exist_ok=True)
            if self.folder.exists():
                remove(self.folder)  # left by a run that was killed; it must not be found
            self.folder.mkdir()
            for folder in (self.workspace, self.home, self.tmp):
                folder.mkdir()
            (self.home / HOME_FOLDERS["CODEX_HOME"]).mkdir()  # Codex does not start without; the others make their own

    def inner(self, path: Path) -> Path:
        """The path itself: nothing is remapped."""
        return path

    def environment(self) -> dict[str, str]:
        """The minimal environment: nothing of ours but the search path, no secret."""
        home = self.inner(self.home)
        return {
            "PATH": search_path(),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "SHELL": "/bin/sh",
            "USER": "agent",
            "HOME": str(home),
            "TMPDIR": str(self.inner(self.tmp)),
            **{name: str(home / below) for name, below in HOME_FOLDERS.items()},
            nursery.EXECUTION_MARK: self._id,
            nursery.RUN_MARK: nursery.RUN_ID,
        }

    def command(self, launch: Launch, log: Path) -> nursery.Command:
        """The launch as a warden understands it; its files are in place."""
        with boundary(SandboxError, str(self.home)):
            for name, text in launch.files.items():
                (self.home / name).parent.mkdir(parents=True, exist_ok=True)
                (self.home / name).write_text(text)
        env = self.environment() | launch.env
        return nursery.Command(launch.argv, env, str(self.workspace), launch.stdin, str(log.resolve()))

    async def run(
        self, launch: Launch, *, timeout_s: float, log: Path, held_s: Callable[[], float] | None = None
    ) -> Exit:
        """Run to the end or to the deadline; then nothing it started is alive.

        A warden killed by what it watched is the policy's doing here, and so an exit like any other.
        """
        report = await nursery.run(self.command(launch, log), timeout_s=timeout_s, held_s=held_s)
        if report.lost:
            await asyncio.to_thread(nursery.kill_marked, self._id)
            return Exit(None, report.timed_out, tail_of(log) + "\n[what ran here killed its own warden]")
        self._check_gone(report)
        return Exit(report.code, report.timed_out, report.tail)

    def _check_gone(self, report: nursery.Report) -> None:
        if report.stuck:
            raise SandboxError(f"processes {report.stuck} survive SIGKILL", where=self._id)

    async def close(self, timeout_s: float) -> None:
        """Remove the folders (the workspace only if it is not kept). Processes are gone already: ``run`` saw to it."""
        doomed = [self.home, self.tmp] if self._keep else [self.folder]
        try:
            await asyncio.wait_for(asyncio.to_thread(remove, *doomed), timeout_s)
        except (TimeoutError, OSError) as cause:
            raise SandboxError(f"abandoned: {cause or f'not removed within {timeout_s} s'}", where=self._id) from cause


def search_path() -> str:
    """Our own interpreter's folder first, so that ``python3`` is the Python we run on; then our PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def tail_of(log: Path) -> str:
    """The last bytes of a log, or nothing."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - warden.TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def remove(*folders: Path) -> None:
    """Remove trees the agent may have locked with chmod. Raises OSError if it cannot."""

    def unlock(function: Callable[..., Any], path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        for locked in (Path(path).parent, Path(path)):
            if locked.is_dir() and not locked.is_symlink():
                locked.chmod(stat.S_IRWXU)
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)

    for folder in folders:
        shutil.rmtree(folder, onerror=unlock)
