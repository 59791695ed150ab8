"""The life of a cell: which role it has, where it goes, and what happens when it does not get there in time.

    starting ─▶ pulling ─▶ joining_rollout ─▶ ROLLOUT ─▶ draining ─▶ releasing ─▶ joining_training ─▶ TRAINING
                   ▲                             ▲  late    │           │ late           │ late           │
                   │                             └──────────┘           │                │                ▼
                   └────────────────────────────────────────────────────┴────────────────┴──────────── flushing

ROLLOUT and TRAINING wait for a policy; every other living state is on its way and has a deadline. Missing it leads to
the state's fallback, nearer to a role that works: a switch is rolled back, or the cell is dead and is started again.
Only ROLLOUT is in the balancer, and a cell gets out of it by draining alone, where the gate closes and calls are
moved before anything is released (field case C01).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Literal

from opengyre.errors import CellError

Role = Literal["rollout", "train"]


class CellState(StrEnum):
    """Where a cell is between its roles."""

    STARTING = "starting"  # its process comes up and loads what it needs to take a role
    PULLING = "pulling"  # gets the current weights, its engine closed
    JOINING_ROLLOUT = "joining_rollout"  # its engine gets all regions back; admission opens last
    ROLLOUT = "rollout"  # in the balancer, serving
    DRAINING = "draining"  # out of the balancer, gate closed, calls moved elsewhere
    RELEASING = "releasing"  # no call left; the engine gives up weights and KV
    JOINING_TRAINING = "joining_training"  # the training replica loads the current weights
    TRAINING = "training"  # claims micro-steps
    FLUSHING = "flushing"  # claims nothing more; hands its local sum over
    DEAD = "dead"  # its process is gone or given up; it may be started again
    STOPPED = "stopped"  # ended because the run did

    @property
    def stable(self) -> bool:
        """True in a role: a policy may move it."""
        return self in (CellState.ROLLOUT, CellState.TRAINING)

    @property
    def transient(self) -> bool:
        """True on the way: it has a deadline and a fallback."""
        return self in FALLBACK

    @property
    def routable(self) -> bool:
        """True if the balancer may send it calls."""
        return self is CellState.ROLLOUT

    @property
    def heading(self) -> Role | None:
        """The role it has or is on its way to; None while that is open (starting, dead, stopped)."""
        return _HEADING.get(self)


_C = CellState
_HEADING: dict[CellState, Role] = {
    _C.PULLING: "rollout",
    _C.JOINING_ROLLOUT: "rollout",
    _C.ROLLOUT: "rollout",
    _C.DRAINING: "train",
    _C.RELEASING: "train",
    _C.JOINING_TRAINING: "train",
    _C.TRAINING: "train",
    _C.FLUSHING: "rollout",
}

NEXT: Mapping[CellState, frozenset[CellState]] = {
    # a process may come up with the weights already in place, and then enters its role at once
    _C.STARTING: frozenset({_C.PULLING, _C.JOINING_ROLLOUT, _C.JOINING_TRAINING, _C.TRAINING}),
    _C.PULLING: frozenset({_C.JOINING_ROLLOUT}),
    _C.JOINING_ROLLOUT: frozenset({_C.ROLLOUT}),
    _C.ROLLOUT: frozenset({_C.DRAINING}),
    # straight on to pulling: new weights for a cell that stays in its role; back: the switch is called off
    _C.DRAINING: frozenset({_C.RELEASING, _C.PULLING, _C.ROLLOUT}),
    _C.RELEASING: frozenset({_C.JOINING_TRAINING, _C.PULLING}),
    _C.JOINING_TRAINING: frozenset({_C.TRAINING, _C.PULLING}),
    # back to joining: it stays a trainer and loads the version that was just published
    _C.TRAINING: frozenset({_C.FLUSHING, _C.JOINING_TRAINING}),
    _C.FLUSHING: frozenset({_C.PULLING, _C.TRAINING}),
    _C.DEAD: frozenset({_C.STARTING}),
    _C.STOPPED: frozenset(),
}
"""Transitions besides those to DEAD (from any living state) and STOPPED (from any but itself)."""

FALLBACK: Mapping[CellState, CellState] = {
    _C.STARTING: _C.DEAD,
    _C.PULLING: _C.DEAD,  # without weights it has no role to fall back to
    _C.JOINING_ROLLOUT: _C.DEAD,
    _C.DRAINING: _C.ROLLOUT,  # nothing was given up yet: open the gate again
    _C.RELEASING: _C.PULLING,  # some regions may be gone: take the whole way back
    _C.JOINING_TRAINING: _C.PULLING,
    _C.FLUSHING: _C.PULLING,  # what it did not hand over is claimable again
}


class CellMachine:
    """The state of one cell, and the only place where it changes.

    Args:
        name: the cell's name.
        core: True for the cell that owns weights and optimizer. It starts into training, and leaves it only if
            ``core_may_leave`` (policies whose core rolls out too); when a switch of it fails it goes back to training.
        deadline_s: how long it may stay in a transient state; one value for all, or one per state.
        clock: seconds on the run's clock.
    """

    __slots__ = ("_clock", "_core", "_deadline_s", "_may_leave", "_name", "_since", "_state")

    def __init__(
        self,
        name: str,
        *,
        core: bool = False,
        core_may_leave: bool = False,
        deadline_s: float | Mapping[CellState, float] = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        per_state = deadline_s if isinstance(deadline_s, Mapping) else dict.fromkeys(FALLBACK, deadline_s)
        if missing := sorted(set(FALLBACK) - set(per_state)):
            raise CellError(f"no deadline for {', '.join(missing)}", where=f"cell {name}")
        self._name, self._core, self._may_leave = name, core, core_may_leave
        self._deadline_s = dict(per_state)
        self._clock = clock
        self._state, self._since = CellState.STARTING, clock()

    @property
    def name(self) -> str:
        """The cell's name."""
        return self._name

    @property
    def core(self) -> bool:
        """True for the core cell."""
        return self._core

    @property
    def state(self) -> CellState:
        """Where it is now."""
        return self._state

    @property
    def now(self) -> float:
        """Seconds on the run's clock."""
        return self._clock()

    @property
    def since(self) -> float:
        """When it entered its state, seconds on the run's clock."""
        return self._since

    @property
    def patience_s(self) -> float | None:
        """How long it may stay in its state, seconds; None in a state without a deadline."""
        return self._deadline_s[self.state] if self.state.transient else None

    def allowed(self) -> frozenset[CellState]:
        """The states it may enter next."""
        here = self.state
        if here is CellState.STOPPED:
            return frozenset()
        nearby = NEXT[here] | {CellState.STOPPED}
        if here is not CellState.DEAD:
            nearby |= {CellState.DEAD}
        if self._core:
            if here is CellState.STARTING:
                nearby -= {CellState.PULLING, CellState.JOINING_ROLLOUT}  # it owns the weights: it trains first
            if here is CellState.TRAINING and not self._may_leave:
                nearby -= {CellState.FLUSHING}
            if here is CellState.JOINING_TRAINING and not self._may_leave:
                nearby -= {CellState.PULLING}
        return nearby

    def to(self, state: CellState) -> None:
        """Enter a state. Raises CellError when there is no such way, naming those there are."""
        if state not in self.allowed():
            ways = ", ".join(sorted(self.allowed())) or "nothing"
            raise CellError(f"cannot go from {self.state} to {state}", where=f"cell {self._name}", right=ways)
        self._state, self._since = state, self._clock()

    def fallback(self) -> CellState | None:
        """Where a missed deadline leads from here; None in a state without a deadline."""
        if self._core and self.state is CellState.FLUSHING:
            return CellState.TRAINING  # weights and optimizer never left
        if self._core and self.state is CellState.JOINING_TRAINING:
            return CellState.DEAD  # no weights but its own: it is restored from its checkpoint
        return FALLBACK.get(self.state)
