"""``opengyre collect``: run tasks through a harness and score them, without training.

    tasks x executions ─▶ GroupRunner ─▶ harness ─▶ proxy ─▶ one engine (``module:function``), or the run's own cells
                              │ group complete
                              ▼
                  run folder: calls, trees, rewards — what ``opengyre sft``, ``tree``, ``replay`` and ``report`` read

Who waits for what: the loop waits for completed groups, which every execution's deadline bounds. A collection that was
ended goes on with ``--resume``: finished executions stay, the others are run again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from opengyre.errors import ConfigError, EngineError, OpenGyreError, RecordError, boundary
from opengyre.executions.groups import GroupRunner
from opengyre.executions.outcome import ExecutionResult
from opengyre.executions.runner import Runner
from opengyre.executions.task import Task
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.heap import settle
from opengyre.proxy.router import Router
from opengyre.proxy.session import Sessions
from opengyre.record.store import Store
from opengyre.rollout.custom import MakeEngine, load_engine
from opengyre.run.door import SessionDoor
from opengyre.run.guard import Guard
from opengyre.run.harvest import Harvest
from opengyre.run.journal import Journal
from opengyre.run.parts import assemble_parts
from opengyre.run.preflight import Prepared, claim_run_dir
from opengyre.run.states import ExecutionStates
from opengyre.watch.events import EventLog, read
from opengyre.watch.report import write_report

Said = Callable[[str], None]


@dataclass
class Collected:
    """What came of it. ``rewards`` are of the scored executions."""

    rewards: list[float] = field(default_factory=list)
    unscored: int = 0

    def add(self, results: list[ExecutionResult]) -> None:
        """Count a group."""
        self.rewards += [r.reward for r in results if r.reward is not None]
        self.unscored += sum(r.reward is None for r in results)


@dataclass
class _Parts:
    """What the loop drives; ``failure`` is done when something broke for good."""

    groups: GroupRunner
    journal: Journal
    harvest: Harvest
    door: SessionDoor
    guard: Guard
    failure: asyncio.Future[Any]


def collect(
    prepared: Prepared, *, executions: int, engine: str | None, split: str, limit: int | None, say: Said
) -> Collected:
    """Run every task of ``split`` (at most ``limit`` of them) ``executions`` times and record it in the run folder.

    Args:
        engine: name of a maker of engines; None serves the config's own model on the config's own cells.
        say: told of progress, a line at a time.

    Raises:
        OpenGyreError: what broke for good.
        KeyboardInterrupt: the user ended it; ``--resume`` goes on.
    """
    tasks = (prepared.train if split == "train" else prepared.held_out)[:limit]
    if not tasks:
        raise ConfigError(f"has no task in {split}", where="tasks", right="--split train or held_out")
    make = None if engine is None else load_engine(engine)
    lock = claim_run_dir(prepared)
    try:
        return asyncio.run(_collect(prepared, tasks, executions, make, say))
    finally:
        lock.close()
        if prepared.config.watch.report and (prepared.run_dir / "events.jsonl").exists():
            with contextlib.suppress(OSError):
                write_report(prepared.run_dir)


async def _collect(
    prepared: Prepared, tasks: list[Task], executions: int, make: MakeEngine | None, say: Said
) -> Collected:
    config, log = prepared.config, prepared.run_dir / "events.jsonl"
    past = list(read(log)) if log.exists() else []
    events = EventLog(log)
    state = "resume" if prepared.resumed else "start"
    events.emit(
        "run", state=state, name=config.name, policy="collect", steps=0, seed=config.seed, learning_rate=0.0, cells=[]
    )
    reason = "interrupted"
    try:
        async with _cells(prepared, events, past) if make is None else _engine(prepared, events, make) as parts:
            collected = await _loop(parts, tasks, executions, say)
        reason = "done"
        return collected
    except OpenGyreError as error:
        reason = str(error)
        raise
    finally:
        with contextlib.suppress(RecordError):
            events.emit("run", state="end", reason=reason)
        events.close()


async def _loop(parts: _Parts, tasks: list[Task], executions: int, say: Said) -> Collected:
    """Submit what is not done, and take in what completes."""
    collected, known = Collected(), {row.query_id: row for row in parts.journal.queries("train")}
    life = int(parts.journal.get("life") or 0)
    waiting = 0
    for number, task in enumerate(tasks):
        query_id = f"q{number:06d}"
        done = parts.journal.results(query_id)
        if query_id in known and len(done) >= executions:
            collected.add(done)
            continue
        if query_id not in known:
            parts.journal.admit(query_id, task.task_id, "train", 0)
        parts.groups.submit(number, task, size=executions, first_attempt=100 * life, done=done)
        waiting += 1
    for count in range(waiting):
        query_id, results = await _next(parts)
        parts.journal.complete(query_id)
        collected.add(results)
        if error := parts.guard.query(dropped=all(r.reward is None for r in results)):
            raise error
        for result in results:
            parts.door.forget(result.execution_id)
        if (count + 1) % 10 == 0 or count + 1 == waiting:
            say(describe(collected, f"{len(tasks) - waiting + count + 1}/{len(tasks)} tasks"))
    return collected


async def _next(parts: _Parts) -> tuple[str, list[ExecutionResult]]:
    complete = asyncio.ensure_future(parts.groups.next_complete())
    await asyncio.wait({complete, parts.failure}, return_when=asyncio.FIRST_COMPLETED)
    if parts.failure.done():
        complete.cancel()
        parts.failure.result()
    return await complete


def describe(collected: Collected, head: str) -> str:
    """One line of progress."""
    n = len(collected.rewards)
    if not n:
        return f"{head}, no execution has a score"
    whole = sum(reward >= 1.0 for reward in collected.rewards)
    mean = sum(collected.rewards) / n
    return (
        f"{head}, {n} scored executions, mean reward {mean:.2f}, {whole / n:.0%} with 1; {collected.unscored} without"
    )


@asynccontextmanager
async def _engine(prepared: Prepared, events: EventLog, make: MakeEngine) -> AsyncIterator[_Parts]:
    """Proxy, sessions and executions around one engine in this process."""
    config, run_dir = prepared.config, prepared.run_dir
    async with AsyncExitStack() as stack:
        journal = Journal(run_dir / "run.db")
        stack.callback(journal.close)
        journal.put("life", str(int(journal.get("life") or -1) + 1))
        store = Store.open(run_dir / "calls.db")
        stack.callback(store.close)
        with boundary(EngineError, "--engine"):
            engine = make(config, prepared.renderer)
        sessions, router = Sessions(store, max_calls=config.executions.max_calls), Router()
        server = ProxyServer(
            sessions, CallDriver(prepared.renderer, router, sessions, clock=lambda: events.now), config.proxy
        )
        await server.start(config.proxy.host, config.proxy.port)
        stack.push_async_callback(server.stop)
        router.add(engine, config.cells.slots)
        door, guard = SessionDoor(sessions, config), Guard()
        harvest = Harvest(config, store, door.tree, run_dir, prepared.renderer.decode)
        states = ExecutionStates(events, journal, harvest, door, guard)
        runner = Runner(config, prepared.harness, door, run_dir / "executions", states)
        groups = GroupRunner(
            runner.run,
            group_size=config.samples.group_size,
            infra_retries=config.executions.infra_retries,
            limit=config.executions.max_running or config.cells.slots,
            on_queued=states,
        )
        stack.push_async_callback(groups.close)
        failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        states.fail = lambda error: None if failure.done() else failure.set_exception(error)
        settle()
        yield _Parts(groups, journal, harvest, door, guard, failure)


@asynccontextmanager
async def _cells(prepared: Prepared, events: EventLog, past: list[dict[str, Any]]) -> AsyncIterator[_Parts]:
    """The run's own cells, serving its own model; there is no step, so none of them trains."""
    idle = replace(prepared, config=msgspec.structs.replace(prepared.config, steps=0))
    async with assemble_parts(idle, events, past) as parts:
        yield _Parts(parts.groups, parts.journal, parts.harvest, parts.door, parts.guard, parts.controller.failure)
