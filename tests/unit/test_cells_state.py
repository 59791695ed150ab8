"""The cell lifecycle, searched state by state: no dead end, no way around the order of a switch (field case C01)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from opengyre.cells.state import FALLBACK, CellMachine, CellState
from opengyre.errors import CellError

C = CellState
KINDS = {
    "satellite": {"core": False},
    "core": {"core": True},
    "core that may leave": {"core": True, "core_may_leave": True},
}


def reach(kind: str) -> dict[CellState, tuple[CellState, ...]]:
    """Every state a cell of this kind can be in, with one way there: explicit search over the real object."""
    ways: dict[CellState, tuple[CellState, ...]] = {C.STARTING: ()}
    frontier = [C.STARTING]
    while frontier:
        here = frontier.pop(0)
        for state in sorted(at(kind, ways[here]).allowed()):
            if state not in ways:
                ways[state] = (*ways[here], state)
                frontier.append(state)
    return ways


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def at(kind: str, way: Iterable[CellState], clock: Clock | None = None) -> CellMachine:
    """A cell that went this way."""
    cell = CellMachine("a", deadline_s=10.0, clock=clock or Clock(), **KINDS[kind])
    for state in way:
        cell.to(state)
    return cell


def closure(kind: str, start: CellState) -> set[CellState]:
    """All states reachable from one."""
    ways, seen, frontier = reach(kind), set(), [start]
    while frontier:
        here = frontier.pop()
        for state in at(kind, ways[here]).allowed() - seen:
            seen.add(state)
            frontier.append(state)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_from_every_state_a_role_can_be_reached_and_the_run_can_end(kind: str) -> None:
    for state in reach(kind):
        if state is C.STOPPED:
            continue
        assert {C.ROLLOUT, C.TRAINING} & closure(kind, state)
        assert C.STOPPED in closure(kind, state)


@pytest.mark.parametrize("kind", KINDS)
def test_fallbacks_alone_always_end_in_a_role_or_dead(kind: str) -> None:
    for way in reach(kind).values():
        cell, steps = at(kind, way), 0
        while (fallback := cell.fallback()) is not None:
            cell.to(fallback)  # there is such a way
            steps += 1
            assert steps <= len(FALLBACK)
        assert cell.state in (C.ROLLOUT, C.TRAINING, C.DEAD, C.STOPPED)


def test_every_state_on_the_way_has_a_deadline_and_no_other_has() -> None:
    for state in C:
        assert state.transient != (state.stable or state in (C.DEAD, C.STOPPED))
    for kind in KINDS:
        for state, way in reach(kind).items():
            cell = at(kind, way)
            assert (cell.patience_s is None) == (cell.fallback() is None) == (not state.transient)


def test_the_core_never_leaves_training_unless_allowed() -> None:
    assert not {C.FLUSHING, C.PULLING, C.ROLLOUT} & set(reach("core"))
    assert {C.FLUSHING, C.ROLLOUT} <= set(reach("core that may leave"))
    assert {C.FLUSHING, C.ROLLOUT, C.TRAINING} <= set(reach("satellite"))


def test_c01_calls_are_moved_before_anything_is_released() -> None:
    """Nothing is released or replaced under a cell that the balancer still knows."""
    cell = at("satellite", reach("satellite")[C.ROLLOUT])
    assert cell.allowed() == {C.DRAINING, C.DEAD, C.STOPPED}
    assert [state for state in C if state.routable] == [C.ROLLOUT]
    with pytest.raises(CellError, match="cannot go from rollout to releasing"):
        cell.to(C.RELEASING)


def test_deadlines_are_those_of_each_state_and_time_is_the_clock_s() -> None:
    clock = Clock(3.0)
    cell = CellMachine("a", deadline_s=dict.fromkeys(FALLBACK, 10.0) | {C.PULLING: 7.0}, clock=clock)
    clock.now = 4.0
    cell.to(C.PULLING)
    assert (cell.state, cell.since, cell.state.heading, cell.patience_s) == (C.PULLING, 4.0, "rollout", 7.0)


@pytest.mark.parametrize("field", ["state", "since", "now", "patience_s", "core", "name", "role"])
def test_lifecycle_fields_cannot_be_set_from_outside(field: str) -> None:
    with pytest.raises(AttributeError):
        setattr(CellMachine("a"), field, None)


def test_deadlines_per_state_must_be_complete() -> None:
    with pytest.raises(CellError, match="no deadline for"):
        CellMachine("a", deadline_s={C.STARTING: 5.0})
