"""Gives cells their roles while a run goes on.

    pulse (waterlevel, claims, step, switch done) or tick ─▶ snapshot ─▶ policy.decide ─▶ switches, each a task
    a cell's process ends ─▶ its calls go on elsewhere, its claims are claimable again ─▶ restart ─▶ back in a role
    step committed ─▶ publish ─▶ every rollout cell pulls, training cells pull before their next claim

The policy is a pure object and sees only the snapshot; everything that takes time happens here. Nobody waits for the
controller: calls and claims go on while a switch is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from opengyre.cells.live import LiveCell, Published, Switch
from opengyre.cells.measured import Measured
from opengyre.cells.policies.base import Action, CellView, Decision, Policy, Snapshot, SoFar, wants_outlook
from opengyre.cells.policies.survival import Outlook
from opengyre.cells.pulse import Pulse
from opengyre.cells.repair import Repair
from opengyre.cells.state import CellState
from opengyre.cells.step import OpenStep
from opengyre.cells.training_loop import TrainingLoop
from opengyre.cluster.base import CellProcess, Cluster
from opengyre.config import RunConfig
from opengyre.errors import CellError, OpenGyreError, RecordError, TransferError
from opengyre.watch.events import EventLog

TICK_S = 0.5  # cool-downs and leases run out without an event
_PACED_TICK_S = (10.0, 0.05)  # of a paced cluster, as the simulator's; and at least so many of ours
_MAX_RESTARTS = 5  # per cell and run; more is a defect, not an accident
_KEPT_WEIGHTS = 2  # published versions: the current one, and the one that a slow pull may still be reading


class Work(msgspec.Struct, frozen=True):
    """What the conductor knows and the policy must: see Snapshot for the meaning."""

    queued: int
    running: int
    unfinished_groups: int
    admissible_queries: int
    step_groups: int
    ready_groups: int
    missing_groups: int = 0  # that the open step still waits for


class Controller:
    """Owns the live cells. Implements ``training_loop.TrainingWork``."""

    def __init__(
        self,
        config: RunConfig,
        cells: list[LiveCell],
        cluster: Cluster,
        policy: Policy,
        events: EventLog,
        *,
        work: Callable[[], Work],
        restore_core: Callable[[CellProcess, int], Awaitable[int]],
        on_roles: Callable[[], None],
        outlook: Callable[[int], Outlook] = lambda missing_groups: Outlook(),
    ) -> None:
        self.pulse = Pulse()
        self.core_lock = asyncio.Lock()
        self.open_step: OpenStep | None = None
        self.published = Published(-1, {})
        self.cells = {cell.name: cell for cell in cells}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._core = next(cell for cell in cells if cell.spec.core)
        self._config, self._cluster, self._policy, self._events = config, cluster, policy, events
        self._work, self._restore_core, self._on_roles = work, restore_core, on_roles
        self._outlook = outlook
        modelled_s, least_s = _PACED_TICK_S
        self._tick_s = max(least_s, modelled_s / config.paced.speed) if config.paced.speed else TICK_S
        self._so_far = SoFar()
        self._measured = Measured()
        self._version = -1  # the committed one; -1 until the core has said what the run stands on
        self._publications = 0
        self._kept: list[str] = []
        self._restarts: dict[str, int] = {}
        self._background: list[asyncio.Task[None]] = []
        heartbeat_s = config.cells.heartbeat_s
        self._repair = Repair(cells, self._renew, fail=self.fail, pulse=self.pulse, every_s=heartbeat_s)
        for cell in cells:
            cell.connect(
                published=lambda: self.published,
                on_change=self._changed,
                on_silence=partial(self._repair.broken, cell),
            )

    # --- start and end

    async def start(self) -> None:
        """Start every cell: the core publishes its weights, satellites pull them and serve."""
        await asyncio.gather(*(cell.start(self._cluster) for cell in self.cells.values()))
        await self._restore()
        for cell in self.cells.values():
            self._repair.watch(cell)
        await asyncio.gather(*(self._first_role(cell) for cell in self.cells.values()))
        self._background = [
            asyncio.create_task(self._control(), name="controller"),
            asyncio.create_task(self._repair.probe(), name="probe"),
        ]

    async def close(self) -> None:
        """Stop deciding, then end every cell."""
        tasks: list[asyncio.Task[None] | None] = [*self._background, *self._repair.close()]
        tasks += [task for cell in self.cells.values() for task in (cell.switching, cell.training)]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)
        await self._cluster.close()

    # --- what training loops and the conductor ask

    @property
    def core_alive(self) -> bool:
        """False from the moment the core's loss is known until it is replaced."""
        return self._core.has_process

    @property
    def core_process(self) -> CellProcess:
        """The core's process. Raises CellError while it is being replaced."""
        return self._core.process

    @property
    def core_trains(self) -> bool:
        """True in the training role: the core's engine samples nothing whose weights a commit would change."""
        return self._core.state is CellState.TRAINING

    def core_broken(self, process: CellProcess, reason: str) -> None:
        """This process of the core's failed a call; it is replaced unless it was already."""
        if self._core.has_process and self._core.process is process:
            self._repair.broken(self._core, reason)

    @property
    def rollout_cells(self) -> int:
        """Cells that serve now."""
        return sum(cell.state is CellState.ROLLOUT for cell in self.cells.values())

    async def bring_up_to_date(self, cell: str) -> None:
        """Make ``cell`` hold the published weights."""
        await self.cells[cell].pull()

    def open(self, step: OpenStep) -> None:
        """``step`` takes gradients from now on."""
        self.open_step = step
        self._measured.opened(self._events.now)
        self.pulse.beat()

    def committed(self, version: int) -> None:
        """A step is durable: ``version`` is what a core that is replaced from now on has to hold."""
        self.open_step = None
        self._version = version

    async def publish(self) -> None:
        """Have serving cells hold the committed version; returns when it is published, by a new core if need be."""
        while self.published.version != self._version:
            seen = self.pulse.count
            try:
                await self._publish()
            except CellError:  # the core is being replaced, and its replacement publishes
                await self.pulse.after(seen, self._tick_s)
        serving = [cell for cell in self.cells.values() if cell.state is CellState.ROLLOUT]
        await asyncio.gather(*(self._pull_or_lose(cell) for cell in serving))

    async def _publish(self) -> None:
        """Store the core's weights where cells can pull them."""
        version = self._version
        self._publications += 1  # a version is published again when the core was replaced, and keys are written once
        key = f"weights-{version}-{self._publications}"
        ref = await self._core.process.call("publish", key=key)
        self.published = Published(version, ref)
        self._core.version = version
        self._kept.append(key)
        while len(self._kept) > _KEPT_WEIGHTS:
            self._core.process.notify("drop", key=self._kept.pop(0))

    # --- deciding

    def snapshot(self) -> Snapshot:
        """What the policy sees."""
        work, step = self._work(), self.open_step
        self._measured.see(step, self._events.now)
        outlook = self._outlook(work.missing_groups) if wants_outlook(self._policy) else Outlook()
        snapshot = Snapshot(
            now=self._events.now,
            cells=[
                CellView(
                    name=cell.name,
                    core=cell.spec.core,
                    state=cell.state,
                    version=cell.version,
                    running=cell.running,
                    since=cell.since,
                    kv_tokens=cell.kv_tokens,
                )
                for cell in self.cells.values()
            ],
            slots=self._config.cells.slots,
            queued=work.queued,
            running=work.running,
            unfinished_groups=work.unfinished_groups,
            admissible_queries=work.admissible_queries,
            step_groups=work.step_groups,
            ready_groups=work.ready_groups,
            claimable_micro_steps=step.claimable if step else 0,
            claimed_micro_steps=step.claimed if step else 0,
            micro_step_s=step.micro_step_s if step else None,
            step_eta_s=outlook.step_eta_s,
            next_group_s=outlook.next_group_s,
            step_open=step is not None,
            step_full=step is not None and step.closed,
            version=self.published.version,
            commit_s=self._measured.commit_s,
            switch_cost_s=self._measured.switch_cost_s,
            switches=self._measured.switches,
        )
        return self._so_far.note(snapshot)

    def admit(self, admissible: int) -> int:
        """How many of so many queries the policy has started now."""
        if not admissible:
            return 0
        snapshot = self.snapshot()
        decision = self._policy.decide(snapshot)
        if decision.admit is None:
            return admissible
        admitted = min(admissible, decision.admit)
        if admitted:
            self._log(decision, [], snapshot)
        return admitted

    async def _control(self) -> None:
        try:
            while True:
                seen = self.pulse.count
                if self.open_step is not None:
                    self.open_step.expire()
                snapshot = self.snapshot()
                decision = self._policy.decide(snapshot)
                started = [action for action in decision.actions if self._begin(action, decision.reason)]
                if started:
                    self._log(decision, started, snapshot)
                await self.pulse.after(seen, self._tick_s)
        except Exception as error:  # noqa: BLE001 - a task boundary: the conductor raises it
            self.fail(error)

    def _log(self, decision: Decision, started: list[Action], snapshot: Snapshot) -> None:
        actions = [msgspec.to_builtins(action) for action in started]
        policy = self._config.schedule.policy
        self._events.emit(
            "decision",
            policy=policy,
            actions=actions,
            admit=decision.admit,
            reason=decision.reason,
            snapshot=msgspec.to_builtins(snapshot),
        )

    def _begin(self, action: Action, reason: str) -> bool:
        cell = self.cells[action.cell]
        if cell.switching is not None or cell.state not in (CellState.ROLLOUT, CellState.TRAINING):
            return False
        cell.switching = asyncio.create_task(self._switch(cell, action.role, reason), name=f"{cell.name} switch")
        return True

    async def _switch(self, cell: LiveCell, role: str, reason: str) -> None:
        try:
            if role == "train":
                switch = await cell.to_training(self._loop(cell), reason)
                self._watch_training(cell)
            else:
                switch = await cell.to_rollout(reason)
            self._switched(cell, switch)
        except (CellError, TransferError) as error:
            await self._roll_back(cell, role, f"switch to {role} failed: {error}")
        except OpenGyreError as error:
            self.fail(error)
        cell.switching = None
        self.pulse.beat()

    async def _roll_back(self, cell: LiveCell, role: str, reason: str) -> None:
        """Have ``cell`` go back to a role, or replace it."""
        if self.open_step is not None and cell.state is CellState.FLUSHING and not cell.spec.core:
            self.open_step.lose(cell.name)  # what it had not handed over
        direction = "rollout>train" if role == "train" else "train>rollout"
        self._events.emit("switch", cell=cell.name, direction=direction, total_s=0.0, reason=reason, ok=False)
        try:
            back = await cell.roll_back(reason)
        except (CellError, TransferError) as error:
            back, reason = False, f"{reason}; rolling back failed: {error}"
        if not back:
            cell.switching = None  # what replaces the cell must not end this task
            self._repair.broken(cell, reason)

    def _switched(self, cell: LiveCell, switch: Switch) -> None:
        self._measured.switched(switch.total_s)
        self._events.emit(
            "switch",
            cell=cell.name,
            direction=switch.direction,
            phases=switch.phases,
            total_s=switch.total_s,
            moved_calls=switch.moved_calls,
            kv_tokens=switch.kv_tokens,
            ok=True,
        )

    def _loop(self, cell: LiveCell) -> TrainingLoop:
        if self.open_step is not None and not cell.spec.core:
            self.open_step.lose(cell.name)  # it comes with an empty sum
        flush_every = self._config.train.flush_every
        return TrainingLoop(cell.name, cell.process, core=cell.spec.core, flush_every=flush_every, work=self)

    def _watch_training(self, cell: LiveCell) -> None:
        assert cell.training is not None
        cell.training.add_done_callback(lambda task: self._training_ended(cell, task))

    def _training_ended(self, cell: LiveCell, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TransferError) and not cell.state.transient:
            self._repair.broken(cell, str(error))  # on its way out, the switch fails and says so
        elif error is not None and not isinstance(error, CellError):  # a CellError is the process watcher's business
            self.fail(error)

    # --- deaths

    async def _renew(self, cell: LiveCell, reason: str) -> None:
        """One attempt at a new process. Raises CellError or TransferError when that breaks, RecordError for good."""
        old = cell.process if cell.has_process else None
        self._events.emit("note", level="warning", text=f"{cell.name} is replaced: {reason}")
        if cell.state is not CellState.DEAD:
            cell.lost(reason)
        if self.open_step is not None:
            if cell.spec.core:
                self.open_step.core_reset()
            else:
                self.open_step.lose(cell.name)
        self._restarts[cell.name] = self._restarts.get(cell.name, 0) + 1
        if self._restarts[cell.name] > _MAX_RESTARTS:
            raise RecordError(f"died {_MAX_RESTARTS + 1} times; last: {reason}", where=cell.name)
        if old is not None:
            await old.stop(grace_s=0.0)
        await cell.start(self._cluster)
        if cell.spec.core:
            await self._restore()
        await self._enter_role(cell, "restart")

    async def _restore(self) -> None:
        """Have a fresh core process load what the run stands on, and publish it."""
        self._version = await self._restore_core(self._core.process, self._version)
        await self._publish()

    async def _first_role(self, cell: LiveCell) -> None:
        try:
            await self._enter_role(cell, "start")
        except (CellError, TransferError) as error:
            self._repair.broken(cell, str(error))

    async def _enter_role(self, cell: LiveCell, reason: str) -> None:
        if cell.spec.core:
            cell.train(self._loop(cell), reason)
            self._watch_training(cell)
        else:
            await cell.first_serve(reason)
        self.pulse.beat()

    async def _pull_or_lose(self, cell: LiveCell) -> None:
        began, version = self._events.now, cell.version
        try:
            await cell.pull()
        except (CellError, TransferError) as error:
            self._repair.broken(cell, str(error))
            return
        if cell.version != version:
            took = round(self._events.now - began, 4)
            self._events.emit("pull", cell=cell.name, version=cell.version, seconds=took)

    def _changed(self) -> None:
        self._on_roles()
        self.pulse.beat()

    def fail(self, error: BaseException) -> None:
        """End the run with this cause; the first one counts."""
        if not self.failure.done():
            self.failure.set_exception(error)
