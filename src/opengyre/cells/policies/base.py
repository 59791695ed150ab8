"""What a scheduling policy sees and says.

    snapshot ─▶ Policy.decide ─▶ Decision(actions, reason)

A policy is a pure object: the same snapshot gives the same decision, and time is a field of the snapshot. So the live
controller, the simulator and the tests run the same objects. A measurement that is missing is None, and None is never
taken for idleness. An action names a cell that is in one role now and the other role; the controller may ignore it, and
the policy will see so in the next snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from opengyre.cells.state import CellState, Role
from opengyre.config import RunConfig


class CellView(msgspec.Struct, frozen=True):
    """One cell. ``since``: when it entered its state, seconds on the run's clock; ``running``: calls it serves now;
    ``kv_tokens``: KV it holds, running calls and cached prefixes."""

    name: str
    core: bool
    state: CellState
    version: int
    running: int | None
    since: float
    kv_tokens: int | None = None

    @property
    def heading(self) -> Role | None:
        """The role it has or is on its way to."""
        return self.state.heading


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The run at one moment. Cells are in the order of the run's config; times are seconds on the run's clock.

    The fields with a default sharpen decisions where they are measured; no policy needs them.
    """

    now: float
    cells: list[CellView]
    slots: int  # executions one rollout cell serves at once at full speed
    queued: int | None  # executions that wait to start
    running: int | None  # executions that run
    unfinished_groups: int  # admitted queries whose executions are not all over
    admissible_queries: int  # queries that may be admitted on this version, and so will be at once
    claimable_micro_steps: int
    step_open: bool
    step_full: bool  # no further micro-step will appear in the open step
    version: int
    claimed_micro_steps: int = 0  # being computed or held in a cell's sum
    step_groups: int | None = None  # groups in the open step so far
    ready_groups: int = 0  # completed groups that wait for the next step
    micro_step_s: float | None = None  # what one takes, measured
    step_eta_s: float | None = None  # until the open step has all its groups, estimated
    next_group_s: float | None = None  # until the next group completes, estimated
    commit_s: float | None = None  # from the last counted micro-step of a step until the next one is open, measured
    switch_cost_s: float | None = None  # what one switch takes, measured
    switches: int = 0
    trainer_idle_steps: int = 0  # steps so far in which a training cell waited for groups
    training_cells: float | None = None  # cells for training, if they were split as the work of the last steps was

    @property
    def waterlevel(self) -> int | None:
        """Executions queued + running; None if either is not known."""
        return None if self.queued is None or self.running is None else self.queued + self.running

    def serving(self) -> list[CellView]:
        """Cells in the rollout role now."""
        return [c for c in self.cells if c.state is CellState.ROLLOUT]

    def training(self) -> list[CellView]:
        """Cells in the training role now."""
        return [c for c in self.cells if c.state is CellState.TRAINING]

    def heading(self, role: Role) -> list[CellView]:
        """Cells in a role or on their way to it."""
        return [c for c in self.cells if c.heading == role]


class Action(msgspec.Struct, frozen=True):
    """Move ``cell`` to ``role``."""

    cell: str
    role: Role


class Decision(msgspec.Struct, frozen=True):
    """What to do now, and why - also why nothing.

    ``admit``: how many of the admissible queries to start now; None: all. More than is admissible is never started.
    """

    actions: list[Action]
    reason: str
    admit: int | None = None


class Policy(Protocol):
    """When cells change role.

    A step is committed while the core is in the training role: a policy that takes it out brings it back when the step
    is full. A policy with ``wants_outlook = True`` gets ``next_group_s`` and ``step_eta_s``, as soon as they can be
    estimated; to others they are None, for an estimate costs milliseconds.
    """

    name: str
    moves_core: bool  # True if it may take the core cell out of training

    def decide(self, snapshot: Snapshot) -> Decision:
        """Say which cells change role now; pure."""
        ...


_FADE = 0.8  # a commit: what was worked before counts less, and so the last five steps most

PolicyMaker = Callable[[RunConfig], Policy]


class SoFar:
    """What a run's snapshots say of it so far, added to the next one; the same live and simulated."""

    def __init__(self) -> None:
        self._idle_steps = 0
        self._noted = -1  # the version whose step is among them
        self._before: Snapshot | None = None
        self._rollout_s = self._training_s = 0.0  # cell seconds of work, fading
        self._commits = 0

    def note(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with ``trainer_idle_steps`` and ``training_cells``."""
        s = snapshot
        waits = s.step_open and not s.step_full and not s.claimable_micro_steps and not s.claimed_micro_steps
        if waits and s.step_groups and s.training() and s.version != self._noted:
            self._idle_steps, self._noted = self._idle_steps + 1, s.version
        if self._before is not None:
            self._work(self._before, s.now - self._before.now)
            if s.version != self._before.version:
                self._commits += 1
                self._rollout_s, self._training_s = self._rollout_s * _FADE, self._training_s * _FADE
        self._before = s
        work_s = self._rollout_s + self._training_s
        share = self._training_s / work_s if self._commits and work_s else None
        cells = None if share is None else share * len(s.cells)
        return msgspec.structs.replace(s, trainer_idle_steps=self._idle_steps, training_cells=cells)

    def _work(self, s: Snapshot, seconds: float) -> None:
        """Slots that were taken, as cells; trainers that had a micro-step, or the commit."""
        self._rollout_s += seconds * min((s.running or 0) / s.slots, len(s.serving()))
        self._training_s += seconds * min(s.claimed_micro_steps if s.step_open else 1, len(s.training()))


def wants_outlook(policy: Policy) -> bool:
    """True if estimates of what is to come are to be made for it."""
    return bool(getattr(policy, "wants_outlook", False))


def hold(reason: str) -> Decision:
    """Change nothing."""
    return Decision([], reason)


def switch_pair_s(snapshot: Snapshot, config: RunConfig) -> float:
    """Seconds that going to the other role and back costs: as measured, else as configured."""
    measured = snapshot.switch_cost_s
    return config.schedule.switch_cost_s if measured is None else 2 * measured


def settled(snapshot: Snapshot, cells: Iterable[CellView], cooldown_s: float) -> list[CellView]:
    """Those of ``cells`` that have been in their role long enough to change it."""
    return [c for c in cells if c.state.stable and snapshot.now - c.since >= cooldown_s]


def keep_one_serving(snapshot: Snapshot, actions: list[Action]) -> list[Action]:
    """Leave out the last action to training that would take the last serving cell from executions that still run.

    A cell that is merely on its way to rollout does not count: it may not arrive.
    """
    serving = {c.name for c in snapshot.serving()}
    leaving = [a for a in actions if a.role == "train" and a.cell in serving]
    if snapshot.waterlevel == 0 or not leaving or len(leaving) < len(serving):
        return actions
    return [a for a in actions if a is not leaving[-1]]
