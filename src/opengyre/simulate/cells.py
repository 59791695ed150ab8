"""The cells of a simulated run: roles and the ways between them, claims and hand-overs, failures.

    ROLLOUT ─▶ draining (calls go on elsewhere) ─ to_train_s ─▶ TRAINING ─▶ claim ─▶ micro-step ─▶ held ─▶ hand over
    TRAINING ─▶ flushing (micro-step at hand, hand-over) ─ to_rollout_s ─▶ ROLLOUT, with an empty cache

As live: a satellite hands its sum over every ``flush_every`` micro-steps, or when nothing is claimable; the core adds
its own in place; the step is committed on the core when every micro-step is counted and the core is in the training
role. A cell that dies loses its calls' KV and what it had not handed over; a core that dies, the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opengyre.cells.policies.base import Action
from opengyre.cells.state import CellState
from opengyre.simulate.faults import check_lost_at, moments
from opengyre.simulate.script import Execution
from opengyre.simulate.serving import Engine
from opengyre.simulate.workload import Host

if TYPE_CHECKING:
    from opengyre.simulate.simulator import Simulator

_C = CellState
_AFFINITY = 0.5  # as proxy/router.py: a cached prefix is not worth half of the slots


@dataclass(slots=True, eq=False)
class Cell:
    """One cell. ``life``: makes the switch that a dead cell had under way void."""

    name: str
    core: bool
    engine: Engine
    state: CellState = _C.STARTING
    since: float = 0.0
    leaving: bool = False
    doing: float = 0.0  # tokens of the micro-step at hand
    began: float = 0.0  # what it is busy with, …
    ends: float = 0.0  # … when that will be done, …
    then: Callable[[Cell], None] | None = None  # … and what then; None: nothing
    held: list[float] = field(default_factory=list)
    life: int = 0
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """It computes, hands over or commits."""
        return self.then is not None


@dataclass(slots=True)
class Step:
    """The open step: tokens of claimable micro-steps, and how many there are and are counted."""

    claimable: list[float] = field(default_factory=list)
    total: int = 0
    counted: list[float] = field(default_factory=list)
    out: int = 0  # claimed or held, not counted yet

    @property
    def complete(self) -> bool:
        """True if every micro-step so far is in the core's sum."""
        return len(self.counted) == self.total


class Pool:
    """All cells of a simulator, and the step they train."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        names = sim.config.cells.names()
        self.cells = {n: Cell(n, core, Engine(sim.cost, sim.config.cells.slots)) for n, core in names}
        self.core = next(c for c in self.cells.values() if c.core)
        cluster = sim.workload.cluster
        check_lost_at(cluster.lost_at_h, self.cells, "cluster.lost_at_h")
        self._failures = {n: moments(n, cluster.cell_mtbf_h, cluster.lost_at_h, sim.seed) for n in self.cells}
        self.engines = {id(c.engine): c for c in self.cells.values()}
        self.serving = 0
        self.step = Step()
        self.committing = False
        self.switches = 0
        self.slowdown = 1.0
        self._open: list[Engine] = []

    # --- roles

    def start(self) -> None:
        """The core trains, satellites serve."""
        for cell in self.cells.values():
            self._to(cell, _C.TRAINING if cell.core else _C.ROLLOUT, "start")
            self._next_failure(cell)

    def begin(self, action: Action, reason: str) -> bool:
        """Start a switch; False if the cell is on its way already."""
        cell = self.cells[action.cell]
        if not cell.state.stable or cell.leaving or cell.state.heading == action.role:
            return False
        self.switches += 1
        cell.reason = reason
        if action.role == "train":
            self._to(cell, _C.DRAINING, reason)
            self._drain(cell, keep_kv=True)
            self.sim.at(self.sim.cost.to_train_s, self._arrive, cell, cell.life, _C.TRAINING)
        elif cell.busy:
            cell.leaving = True
            self._to(cell, _C.FLUSHING, reason)
        else:
            self._leave_training(cell)
        return True

    def _leave_training(self, cell: Cell) -> None:
        cell.leaving = False
        self._to(cell, _C.PULLING, cell.reason)
        self.sim.at(self.sim.cost.to_rollout_s, self._arrive, cell, cell.life, _C.ROLLOUT)

    def _arrive(self, cell: Cell, life: int, state: CellState) -> None:
        if cell.life != life:
            return
        if cell.state in (_C.DRAINING, _C.PULLING) and self.sim.recorder:
            self.sim.recorder.switched(self.sim, cell, self.sim.now - cell.since)
        self._to(cell, state, cell.reason)
        self.sim.pulse()

    def _to(self, cell: Cell, state: CellState, reason: str) -> None:
        now = self.sim.now
        self._count(cell)
        self.sim.tally.level(self.sim)
        cell.state, cell.since = state, now
        self._open = [c.engine for c in self.cells.values() if c.state is _C.ROLLOUT]
        self.serving = len(self._open)
        self.sim.tally.level(self.sim)
        if self.sim.recorder:
            self.sim.recorder.cell(self.sim, cell, reason)
        if state.stable:
            self.sim.at(self.sim.config.schedule.cooldown_s, self.sim.pulse)
        if state is _C.ROLLOUT:
            cell.engine.t = max(cell.engine.t, now)
            cell.engine.epoch += 1
            self.sim.serve_line()
            self.sim.start_executions()
        elif state is _C.TRAINING:
            self.claim(cell)
            self._commit_if_complete()

    def _count(self, cell: Cell) -> None:
        seconds = self.sim.now - cell.since
        cell.seconds[cell.state.value] = cell.seconds.get(cell.state.value, 0.0) + seconds

    def finish(self) -> None:
        """Count the time up to now."""
        self.sim.tally.level(self.sim)
        for cell in self.cells.values():
            self._count(cell)
            cell.since = self.sim.now

    # --- calls

    def seat(self, execution: Execution) -> Engine | None:
        """The engine for a call: where its prefix is, unless another is far less full; None if all are full."""
        best = min(self._open, key=lambda e: e.calls, default=None)
        if best is None or best.calls >= best.slots:
            return None
        home = execution.cached[0] if execution.cached else None
        if home is not None and home in self._open and home.calls < home.slots and home.fill - best.fill <= _AFFINITY:
            return home
        return best

    def _drain(self, cell: Cell, *, keep_kv: bool) -> None:
        """Its calls go on elsewhere, in the order in which they would have ended."""
        engine = cell.engine
        engine.advance(self.sim.now)
        moving = list(dict.fromkeys(engine.running()))
        for execution in moving:
            engine.remove(self.sim.now, execution)
        engine.epoch += 1
        for execution in moving:
            self.sim.tally.moved += 1
            self.sim.place(execution, kv_from=engine if keep_kv else None)

    def pull(self) -> None:
        """Serving cells take the version that was just published; running calls go on with it, prefilled anew."""
        for cell in self.cells.values():
            if cell.state is not _C.ROLLOUT:
                continue
            engine = cell.engine
            engine.advance(self.sim.now)
            engine.epoch += 1
            engine.stall(self.sim.cost.pull_s + self.sim.cost.prefill_s(engine.context))
            self.sim.tally.reprefilled += engine.context
            for execution in engine.running():
                execution.cached = (engine, engine.epoch)
            engine.changes += 1
            self.sim.expect(engine)

    # --- training

    def join(self) -> None:
        """Completed groups that fit become claimable micro-steps."""
        sim, step = self.sim, self.step
        for query_id in sim.assembler.take():
            query = sim.queries[query_id]
            sim.tally.trained(sim, query)
            if not query.train_tokens:
                continue  # a group that trains nothing
            parts = max(1, round(query.train_tokens / sim.workload.micro_step_tokens))
            step.claimable += [query.train_tokens / parts] * parts
            step.total += parts
        for cell in self.cells.values():
            self.claim(cell)
        self._commit_if_complete()

    def claim(self, cell: Cell) -> None:
        """Have a training cell work: the next micro-step, or handing over what it holds."""
        if cell.state is not _C.TRAINING or cell.busy or self.committing:
            return
        flush = self.sim.config.train.flush_every
        if self.step.claimable and len(cell.held) < flush:
            tokens = self.step.claimable.pop()
            self.step.out += 1
            self._work(cell, self.sim.cost.train_s(tokens), self._computed, tokens)
        elif cell.held:
            self._work(cell, self.sim.cost.hand_over_s, self._handed_over)

    def _work(self, cell: Cell, seconds: float, then: Callable[[Cell], None], tokens: float = 0.0) -> None:
        """Be busy with what takes so long on a machine of its own."""
        cell.doing, cell.then = tokens, then
        cell.began, cell.ends = self.sim.now, self.sim.now + seconds * self.slowdown
        if tokens and self.sim.recorder:
            self.sim.recorder.claimed(self.sim, cell)
        self.sim.at(cell.ends - self.sim.now, self._worked, cell, cell.ends)

    def _worked(self, cell: Cell, ends: float) -> None:
        if cell.then is None or cell.ends != ends:
            return  # it was lost, or slowed down
        self.sim.tally.train_s += self.sim.now - cell.began
        then, cell.then = cell.then, None
        then(cell)

    def _computed(self, cell: Cell) -> None:
        if self.sim.recorder:
            self.sim.recorder.computed(self.sim, cell)
        if cell.core:
            self.step.out -= 1
            self.step.counted.append(cell.doing)
        else:
            cell.held.append(cell.doing)
        cell.doing = 0.0
        self._next(cell)

    def _handed_over(self, cell: Cell) -> None:
        self.step.out -= len(cell.held)
        self.step.counted += cell.held
        cell.held = []
        self._next(cell)

    def _next(self, cell: Cell) -> None:
        if cell.state is _C.FLUSHING:
            if cell.held:
                self._work(cell, self.sim.cost.hand_over_s, self._handed_over)
            else:
                self._leave_training(cell)
        else:
            self.claim(cell)
        self._commit_if_complete()
        self.sim.pulse()

    def _commit_if_complete(self) -> None:
        sim = self.sim
        if self.committing or not (sim.assembler.step_full and self.step.complete):
            return
        if self.core.state is _C.TRAINING and not self.core.busy:
            self.committing = True
            self._work(self.core, sim.cost.commit_s + sim.cost.publish_s, self._committed)

    def _committed(self, core: Cell) -> None:
        self.committing = False
        self.step = Step()
        self.sim.committed()
        if core.state is _C.FLUSHING:
            self._leave_training(core)

    # --- a machine that is shared

    def share(self, host: Host) -> None:
        """Slow everything down by what computes now."""
        cells = self.cells.values()
        computing = sum(c.busy or (c.state is _C.ROLLOUT and c.engine.calls > 0) for c in cells)
        calls = len(self.sim.line) + sum(c.engine.calls for c in cells)
        slowdown = max(1.0, host.demand(computing, len(self.sim.running) - calls))
        if slowdown == self.slowdown:
            return
        now, before, self.slowdown = self.sim.now, self.slowdown, slowdown
        for cell in cells:
            cell.engine.slow(now, slowdown)
            self.sim.expect(cell.engine)
            if cell.busy:
                cell.ends = now + (cell.ends - now) * slowdown / before
                self.sim.at(cell.ends - now, self._worked, cell, cell.ends)

    # --- failures

    def _next_failure(self, cell: Cell) -> None:
        moment = next(self._failures[cell.name], None)
        if moment is not None:
            self.sim.at(moment - self.sim.now, self._fail, cell)

    def _fail(self, cell: Cell) -> None:
        sim = self.sim
        if cell.state is _C.DEAD:  # it is being replaced
            self._next_failure(cell)
            return
        cell.life += 1
        sim.tally.failures += 1
        was = cell.state
        self._to(cell, _C.DEAD, "lost")
        if was is _C.ROLLOUT:
            self._drain(cell, keep_kv=False)
        lost = cell.held + ([cell.doing] if cell.doing else [])
        self.step.claimable += lost
        self.step.out -= len(lost)
        cell.held, cell.doing, cell.leaving, cell.then = [], 0.0, False, None
        if cell.core:  # the sums it held; what satellites hold is still theirs to hand over
            self.step.claimable += self.step.counted
            self.step.counted, self.committing = [], False
        sim.at(sim.cost.restart_s, self._arrive, cell, cell.life, _C.TRAINING if cell.core else _C.ROLLOUT)
        self._next_failure(cell)
        sim.pulse()
