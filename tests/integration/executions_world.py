"""A door, scripted harnesses and tasks for the tests of executions: real processes, a real socket, no model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from opengyre.config import HarnessConfig, RunConfig, build
from opengyre.executions.harness.command import CommandHarness
from opengyre.executions.outcome import ExecutionResult
from opengyre.executions.runner import Runner
from opengyre.executions.sandbox import bubblewrap
from opengyre.executions.task import Deadlines, Task

KINDS = [
    "local",
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(bubblewrap.probe()), reason=bubblewrap.probe() or "-")),
]

# What every scripted harness starts with: call("text") is a model call that returns when the door answers.
PRELUDE = """
import json, os, signal, socket, subprocess, sys
def call(text=""):
    host, path = os.environ["ANTHROPIC_BASE_URL"].removeprefix("http://").split("/", 1)
    with socket.create_connection(host.split(":")) as s:
        s.sendall(f"{path} {os.environ['ANTHROPIC_AUTH_TOKEN']} {text}\\n".encode())
        return s.makefile().readline().strip()
def forever():
    while True:
        signal.pause()
"""


class FakeDoor:
    """Counts calls; ``answer(execution_id, text)`` may take its time. The clock of an execution in ``frozen`` stands
    still."""

    def __init__(self, answer: Callable[[str, str], Awaitable[str]] | None = None) -> None:
        self.answer = answer
        self.counts: Counter[str] = Counter()
        self.events: defaultdict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self.open_ids: set[str] = set()
        self.log: list[str] = []
        self.frozen: set[str] = set()
        self.opened_at: dict[str, float] = {}
        self.port = 0

    def open(self, execution_id: str) -> tuple[str, str]:
        self.open_ids.add(execution_id)
        self.opened_at[execution_id] = time.monotonic()
        self.log.append(f"open {execution_id}")
        return f"http://127.0.0.1:{self.port}/x/{execution_id}", f"key-{execution_id}"

    def close(self, execution_id: str) -> None:
        if execution_id in self.open_ids:
            self.open_ids.remove(execution_id)
            self.log.append(f"close {execution_id}")

    async def settled(self, execution_id: str) -> None:
        self.log.append(f"settled {execution_id}")

    def held_s(self, execution_id: str) -> float:
        return time.monotonic() - self.opened_at[execution_id] if execution_id in self.frozen else 0.0

    def calls(self, execution_id: str) -> int:
        return self.counts[execution_id]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, key, text = (await reader.readline()).decode().rstrip("\n").split(" ", 2)
        execution_id = path.removeprefix("x/")
        assert key == f"key-{execution_id}"
        self.counts[execution_id] += 1
        self.events[execution_id, text].set()
        reply = await self.answer(execution_id, text) if self.answer else "ok"
        writer.write(reply.encode() + b"\n")
        writer.close()


@asynccontextmanager
async def served(door: FakeDoor):
    """The door on a free port."""
    server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
    door.port = server.sockets[0].getsockname()[1]
    yield door
    server.close()


def harness(script: str) -> CommandHarness:
    """A harness that is a few lines of Python after the prelude."""
    return CommandHarness(HarnessConfig(kind="command", command=[sys.executable, "-I", "-S", "-c", PRELUDE + script]))


def config(kind: str = "local", **tables: Any) -> RunConfig:
    return build({"sandbox": {"kind": kind, **tables.pop("sandbox", {})}, **tables})


CHECK = """
import json, pathlib, sys
answer = pathlib.Path(sys.argv[1]) / "answer"
good = answer.is_file() and answer.read_text() == "42"
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": float(good), "checks": {"answer": float(good)}}))
"""


def task(**changes: Any) -> Task:
    """Write 42 into ``answer``."""
    fields: dict[str, Any] = {
        "task_id": "answer",
        "instruction": "Write 42 into answer.",
        "files": {"README": "about 42\n"},
        "evaluator": [sys.executable, "-ISB", "{task}/check.py", "{workspace}", "{reward}"],
        "evaluator_files": {"check.py": CHECK},
        "deadlines": Deadlines(boot_s=60.0, agent_s=60.0, evaluator_s=60.0),
    }
    return Task(**fields | changes)


async def run_once(
    root: Path, door: FakeDoor, script: str, the_task: Task | None = None, kind: str = "local", **options: Any
) -> ExecutionResult:
    """One execution of a scripted harness."""
    run_config = options.pop("config", None) or config(kind)
    runner = Runner(run_config, harness(script), door, root, lambda *_: None, **options)
    return await runner.run("q000000-00-0", "q000000", the_task or task())
