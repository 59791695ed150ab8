"""Sandboxes with real processes: clean, separate, and ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from executions_world import KINDS
from opengyre.errors import HarnessError
from opengyre.executions.harness.base import Launch
from opengyre.executions.sandbox import nursery
from opengyre.executions.sandbox.registry import make_sandbox, resolve_kind
from opengyre.executions.sandbox.warden import descendants

PYTHON = [sys.executable, "-I", "-S", "-c"]


def python(script: str, **env: str) -> Launch:
    return Launch([*PYTHON, script], env)


def gone(pid: int, within_s: float = 20.0) -> bool:
    """True when the process has ended; waits for its end, not for time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(fd):
        return bool(select.select([fd], [], [], within_s)[0])


@pytest.mark.parametrize("kind", KINDS)
async def test_environment_is_minimal_and_own(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    sandbox = make_sandbox(kind, "a", tmp_path)
    script = "import os, json; json.dump([dict(os.environ), os.getcwd()], open('seen', 'w')); raise SystemExit(3)"
    end = await sandbox.run(python(script, EXTRA="1"), timeout_s=60, log=tmp_path / "log")
    env, cwd = json.loads((sandbox.workspace / "seen").read_text())
    assert (end.code, end.timed_out) == (3, False)
    assert "AWS_SECRET_ACCESS_KEY" not in env and env["EXTRA"] == "1"
    assert cwd == str(sandbox.inner(sandbox.workspace))
    home = str(sandbox.inner(sandbox.home))
    assert env["HOME"] == home
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        assert env[name].startswith(home)
    assert env["TMPDIR"] == str(sandbox.inner(tmp_path.resolve() / "a" / "tmp"))
    await sandbox.close(10)
    assert not sandbox.workspace.exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_stdin_output_and_tail(kind, tmp_path):
    sandbox = make_sandbox(kind, "a", tmp_path)
    text = "ä" * 300_000  # more than any pipe or socket buffer holds
    script = "import sys; text = sys.stdin.buffer.read().decode(); print(len(text)); print('why', file=sys.stderr)"
    end = await sandbox.run(Launch([*PYTHON, script], {}, text), timeout_s=60, log=tmp_path / "log")
    assert sorted(end.tail.split()) == ["300000", "why"] == sorted((tmp_path / "log").read_text().split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("argv", [["no-such-program"], ["/usr"]])
async def test_a_command_that_cannot_run_is_a_harness_error(kind, argv, tmp_path):
    with pytest.raises(HarnessError):
        await make_sandbox(kind, "a", tmp_path).run(Launch(argv, {}), timeout_s=60, log=tmp_path / "log")


async def test_an_environment_below_a_replaced_folder_is_seen(tmp_path, monkeypatch):
    """This Python may live under /tmp, which inside is the execution's own."""
    if why := resolve_kind("auto") == "local" and "bubblewrap does not work here":
        pytest.skip(why)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    sandbox = make_sandbox("bubblewrap", "q000000-00-0", tmp_path / "root")
    launch = Launch(["/bin/sh", "-c", f"exec {python} -c 'print(6 * 7)'"], {})
    end = await sandbox.run(launch, timeout_s=30, log=tmp_path / "log")
    assert (end.code, end.tail.strip()) == (0, "42")
    await sandbox.close(10)


async def test_bubblewrap_hides_the_host(tmp_path):
    if why := resolve_kind("auto") == "local" and "bubblewrap does not work here":
        pytest.skip(why)
    (tmp_path / "secret").write_text("secret")
    sandbox = make_sandbox("bubblewrap", "a", tmp_path / "root")
    script = f"""
import os
assert not os.path.exists({str(tmp_path / "secret")!r}) and not os.path.exists("/etc/shadow")
assert not os.path.exists({str(Path(__file__))!r})
assert {{int(pid) for pid in os.listdir("/proc") if pid.isdigit()}} <= set(range(1, 10)) and os.getuid() == 1000
try:
    open("/usr/written", "w")
except OSError:
    raise SystemExit(7)
"""
    end = await sandbox.run(python(script), timeout_s=60, log=tmp_path / "log")
    assert end.code == 7, end.tail


# Starts a daemon in its own session and one whose environment is wiped, both deaf to SIGTERM and busy for ever; writes
# all pids into the file ``pids`` of the workspace.
UNRULY = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pids = [os.getpid()]
for env in (dict(os.environ), {}):
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.set_inheritable(w, True)
            code = f"import os; os.write({w}, str(os.getpid()).encode())\\nwhile True: pass"
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code], env)
        os._exit(0)
    os.wait()
    pids.append(int(os.read(r, 20)))
with open("pids.part", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename("pids.part", "pids")
"""


def alive(pids: Path) -> list[str]:
    return [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


async def test_S09_the_end_takes_daemons_and_scrubbed_environments(tmp_path):
    sandbox = make_sandbox("local", "a", tmp_path)
    end = await sandbox.run(python(UNRULY), timeout_s=60, log=tmp_path / "log")
    assert (end.code, end.timed_out) == (0, False), end.tail
    assert len((sandbox.workspace / "pids").read_text().split()) == 3
    assert alive(sandbox.workspace / "pids") == []


async def test_S09_a_harness_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(nursery, "GRACE_S", 0.1)
    sandbox = make_sandbox("local", "a", tmp_path)
    pids, clock = sandbox.workspace / "pids", asyncio.get_running_loop().time
    started = clock()
    end = await sandbox.run(
        python(UNRULY + "\nwhile True: pass"),
        timeout_s=0.1,
        log=tmp_path / "log",
        held_s=lambda: 0.0 if pids.exists() else clock() - started,  # its clock runs once all is started
    )
    assert end.timed_out and end.code == -signal.SIGKILL
    assert alive(pids) == [] and list(nursery.marked("a")) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_kills(kind, tmp_path):
    sandbox = make_sandbox(kind, "a", tmp_path)
    fifo = sandbox.workspace / "fifo"
    os.mkfifo(fifo)
    launch = Launch(["sh", "-c", "sleep 1000 & echo x > fifo; wait"], {})
    running = asyncio.create_task(sandbox.run(launch, timeout_s=60, log=tmp_path / "log"))
    await asyncio.to_thread(fifo.read_text)
    pids = list(nursery.marked("a"))
    assert len(pids) >= 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_killing_the_warden_gains_nothing(tmp_path):
    sandbox = make_sandbox("local", "a", tmp_path)
    script = """
import os, signal, subprocess
subprocess.Popen(["sleep", "1000"], start_new_session=True)
os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
"""
    end = await sandbox.run(python(script), timeout_s=60, log=tmp_path / "log")
    assert end.code is None and not end.timed_out and "warden" in end.tail
    assert list(nursery.marked("a")) == []


async def test_a_killed_nursery_is_replaced(tmp_path):
    async def run(name):
        return await make_sandbox("local", name, tmp_path).run(python("pass"), timeout_s=60, log=tmp_path / "log")

    assert (await run("a")).code == 0
    pids = [pid for pid in descendants() if b"warden.py" in cmdline(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the warden of "a" may be on its way out
            os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert pids and (await run("b")).code == 0


async def test_endless_output_fills_no_disk(tmp_path, monkeypatch):
    sandbox = make_sandbox("local", "a", tmp_path)
    command = sandbox.command(Launch(["sh", "-c", "yes | head -c 3000000; echo end"], {}), tmp_path / "log")
    report = await nursery.run(msgspec.structs.replace(command, log_bytes=1000), timeout_s=60)
    assert (tmp_path / "log").stat().st_size == 1000 and report.tail.endswith("y\nend\n")


async def test_locked_folders_are_removed(tmp_path):
    sandbox = make_sandbox("local", "a", tmp_path)
    launch = Launch(["sh", "-c", "mkdir -p d/e; touch d/e/f; chmod 0 d/e d"], {})
    await sandbox.run(launch, timeout_s=60, log=tmp_path / "log")
    await sandbox.close(10)
    assert not sandbox.workspace.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_leaves_no_process(kind, tmp_path):
    """kill -9 of the run, while a process of it that is no execution lives on and holds all its descriptors."""
    script = f"""
import asyncio, os, subprocess, sys
from pathlib import Path
from opengyre.executions.harness.base import Launch
from opengyre.executions.sandbox.registry import make_sandbox
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "1000"])  # a cell worker that outlives the run for a while
async def main():
    root = Path({str(tmp_path)!r})
    sandbox = make_sandbox({kind!r}, "a", root)
    os.mkfifo(sandbox.workspace / "fifo")
    print(sandbox.workspace / "fifo", flush=True)
    inner = "(setsid sleep 1001 &) ; (env -i setsid sleep 1002 &) ; echo x > fifo; sleep 1003"
    await sandbox.run(Launch(["sh", "-c", inner], {{}}), timeout_s=600, log=root / "log")
asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout
    fifo = Path(run.stdout.readline().strip())
    fifo.read_text()
    pids = descendants(run.pid)
    assert len(pids) >= 6  # nursery, warden, sh, three sleeps, the worker
    run.kill()
    run.wait()
    worker = [pid for pid in pids if b"sleep\x001000" in cmdline(pid)]
    assert all(gone(pid) for pid in pids if pid not in worker)
    for pid in worker:
        os.kill(pid, signal.SIGKILL)
    run.stdout.close()


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
