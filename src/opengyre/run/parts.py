"""Makes the parts of a live run in the order in which they need each other, and ends them in the opposite order."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from opengyre.cells.controller import Controller, Work
from opengyre.cells.live import LiveCell
from opengyre.cells.policies import make_policy
from opengyre.cells.state import FALLBACK, CellMachine, CellState
from opengyre.cluster.base import CellProcess, CellSpec, Cluster
from opengyre.cluster.local import LocalCluster
from opengyre.config import RunConfig
from opengyre.errors import RecordError
from opengyre.executions.groups import GroupRunner
from opengyre.executions.runner import Runner
from opengyre.executions.task import Task
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.heap import settle
from opengyre.proxy.router import Router
from opengyre.proxy.session import Sessions
from opengyre.record.store import Store
from opengyre.rollout.custom import load_engine
from opengyre.run.door import SessionDoor
from opengyre.run.evaluation import Evaluation
from opengyre.run.guard import Guard
from opengyre.run.harvest import Harvest
from opengyre.run.journal import DROPPED, Journal, QueryRow
from opengyre.run.preflight import Prepared
from opengyre.run.states import ExecutionStates
from opengyre.samples.assemble import Assembler, AssemblerState, Pending
from opengyre.training import folders as checkpoints
from opengyre.transfer.shared_memory import SharedMemoryTransfer
from opengyre.watch.events import EventLog


@dataclass
class Parts:
    """Everything a conductor drives.

    ``life`` counts the processes that have worked on this run, from 0; ``past`` are the events of the earlier ones.
    """

    prepared: Prepared
    life: int
    journal: Journal
    events: EventLog
    assembler: Assembler
    unfinished: list[QueryRow]
    groups: GroupRunner
    evaluation: Evaluation
    controller: Controller
    harvest: Harvest
    door: SessionDoor
    guard: Guard
    past: list[dict[str, Any]]

    def task(self, task_id: str) -> Task:
        """The training task of a name."""
        return next(task for task in self.prepared.train if task.task_id == task_id)


@asynccontextmanager
async def assemble_parts(
    prepared: Prepared, events: EventLog, past: Sequence[dict[str, Any]] = ()
) -> AsyncIterator[Parts]:
    """Make and start everything; on the way out, end it in the opposite order.

    Raises:
        ConfigError: the port cannot be had, the sandbox does not work here, a config that does not fit the journal.
        CellError: a cell did not start.
    """
    config, run_dir = prepared.config, prepared.run_dir
    async with AsyncExitStack() as stack:
        journal = Journal(run_dir / "run.db")
        stack.callback(journal.close)
        store = Store.open(run_dir / "calls.db")
        stack.callback(store.close)
        life = int(journal.get("life") or -1) + 1
        journal.put("life", str(life))
        assembler, unfinished = restore(config, journal, run_dir)

        sessions = Sessions(store, max_calls=config.executions.max_calls)
        router = Router()
        driver = CallDriver(prepared.renderer, router, sessions, clock=lambda: events.now)
        server = ProxyServer(sessions, driver, config.proxy)
        await server.start(config.proxy.host, config.proxy.port)
        stack.push_async_callback(server.stop)

        door = SessionDoor(sessions, config)
        harvest = Harvest(config, store, door.tree, run_dir, prepared.renderer.decode)
        guard = Guard()
        states = ExecutionStates(events, journal, harvest, door, guard, speed=config.paced.speed or 1.0)
        runner = Runner(config, prepared.harness, door, run_dir / "executions", states)
        flow = _Flow(config, events, assembler)
        groups, held_out = (flow.group_runner(runner, states) for _ in range(2))
        run_id = f"{os.getpid()}-{run_dir.name}"
        stack.callback(SharedMemoryTransfer(run_id).close)
        policy = make_policy(config)
        controller = Controller(
            config,
            _cells(prepared, run_id, router, events, core_may_leave=policy.moves_core),
            _cluster(prepared),
            policy,
            events,
            work=flow.work,
            restore_core=_core_restorer(run_dir),
            on_roles=flow.set_limits,
            outlook=lambda missing: states.survival.outlook(events.now, missing),
        )
        flow.controller, states.fail = controller, controller.fail
        stack.push_async_callback(controller.close)
        stack.push_async_callback(groups.close)
        stack.push_async_callback(held_out.close)
        await controller.start()
        evaluation = Evaluation(config.eval, prepared.held_out, held_out, journal, events)
        settle()
        yield Parts(
            prepared,
            life,
            journal,
            events,
            assembler,
            unfinished,
            groups,
            evaluation,
            controller,
            harvest,
            door,
            guard,
            list(past),
        )


class _Flow:
    """Ties the executions to the cells: how many may run, how high the water stands, what policies see of it."""

    def __init__(self, config: RunConfig, events: EventLog, assembler: Assembler) -> None:
        self._config, self._events, self._assembler = config, events, assembler
        self._runners: list[GroupRunner] = []
        self._last: tuple[int, int, int] | None = None
        self.controller: Controller | None = None

    def group_runner(self, runner: Runner, states: ExecutionStates) -> GroupRunner:
        """A group runner whose executions count into the waterlevel."""
        groups = GroupRunner(
            runner.run,
            group_size=self._config.samples.group_size,
            infra_retries=self._config.executions.infra_retries,
            limit=0,
            on_waterlevel=lambda queued, running: self._report(),
            on_queued=states,
        )
        self._runners.append(groups)
        return groups

    def work(self) -> Work:
        """What policies see of executions and queries."""
        return Work(
            queued=sum(g.queued for g in self._runners),
            running=sum(g.running for g in self._runners),
            unfinished_groups=len(self._assembler.running),
            admissible_queries=self._assembler.admissible(),
            step_groups=len(self._assembler.step_groups),
            ready_groups=self._assembler.waiting,
            missing_groups=self._assembler.missing,
        )

    def set_limits(self) -> None:
        """Let as many executions run as the cells in the rollout role serve at full speed."""
        assert self.controller is not None
        limit = self._config.cells.slots * self.controller.rollout_cells
        for groups in self._runners:
            groups.limit = min(limit, self._config.executions.max_running or limit)
        self._report()

    def _report(self) -> None:
        if self.controller is None:
            return
        work, cells = self.work(), self.controller.rollout_cells
        if self._last != (work.queued, work.running, cells):
            self._last = (work.queued, work.running, cells)
            slots = self._config.cells.slots
            self._events.emit("waterlevel", queued=work.queued, running=work.running, rollout_cells=cells, slots=slots)
            self.controller.pulse.beat()


def _cluster(prepared: Prepared) -> Cluster:
    """Where the run's cells live."""
    config = prepared.config
    if not config.paced.speed:
        return LocalCluster(prepared.run_dir / "logs")
    from opengyre.paced.cell import PacedCluster
    from opengyre.paced.pace import cost_model, pace_of
    from opengyre.paced.speech import Speech

    name, renderer = config.paced.program, prepared.renderer
    program = None if name is None else load_engine(name, "paced.program")(config, renderer)
    return PacedCluster(config, pace_of(config.paced), cost_model(config.paced), Speech(renderer, program))


def _cells(
    prepared: Prepared, run_id: str, router: Router, events: EventLog, *, core_may_leave: bool
) -> list[LiveCell]:
    config = prepared.config
    cpus = sorted(os.sched_getaffinity(0))
    return [
        LiveCell(
            CellSpec(
                name=name,
                core=core,
                run_id=run_id,
                config=msgspec.to_builtins(config),
                model_path=str(prepared.model_dir),
                cpu=cpus[place % len(cpus)] if config.cells.pin else None,
            ),
            CellMachine(
                name,
                core=core,
                core_may_leave=core_may_leave,
                deadline_s=switch_deadlines(config),
                clock=lambda: events.now,
            ),
            router,
            slots=config.cells.slots,
            kv_transfer=config.cells.kv_transfer,
            silence_s=config.cells.silence_s,
            events=events,
        )
        for place, (name, core) in enumerate(config.cells.names())
    ]


def switch_deadlines(config: RunConfig) -> dict[CellState, float]:
    """How long a cell may be in each state on its way, seconds: leaving training includes the micro-step at hand."""
    every = dict.fromkeys(FALLBACK, config.cells.switch_deadline_s)
    return every | {CellState.FLUSHING: config.cells.switch_deadline_s + config.train.lease_s}


def _core_restorer(run_dir: Path) -> Callable[[CellProcess, int], Awaitable[int]]:
    """How a fresh core process gets the weights of a version (-1: the newest); returns the version it has then."""

    async def restore_core(core: CellProcess, version: int) -> int:
        if version >= 0:
            checkpoints.remove_newer(run_dir, version)  # written, but the core died before it could say so
        whole = checkpoints.whole(run_dir)
        newest = max(whole, default=0)
        if version > newest:
            raise RecordError(
                f"was lost at version {version}; the newest checkpoint is {newest}",
                where="core",
                right="resume the run; train.checkpoint_every = 1 lets a run go on by itself",
            )
        if newest:
            await core.call("restore", folder=str(whole[newest]))
        return newest

    return restore_core


def restore(config: RunConfig, journal: Journal, run_dir: Path) -> tuple[Assembler, list[QueryRow]]:
    """Where the run stands: step assembly, and the queries admitted but not trained.

    The newest whole checkpoint decides what is committed; see journal.py.
    """
    step = journal.step_of(max(checkpoints.whole(run_dir), default=0))
    journal.rollback(step)
    rows = journal.queries("train")
    unfinished = [row for row in rows if row.trained_step is None]
    pending = [
        Pending(row.query_id, row.version + config.schedule.max_staleness, number if row.complete else None)
        for number, row in enumerate(unfinished)
    ]
    dropped = sum(row.trained_step == DROPPED for row in rows)
    state = AssemblerState(step, pending, len(rows), dropped, len(rows) - len(unfinished) - dropped)
    assembler = Assembler(
        config.samples.queries_per_step, config.schedule.max_staleness, steps=config.steps, state=state
    )
    return assembler, unfinished
