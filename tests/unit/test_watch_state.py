"""A run's present, folded from its events: roles, waterlevel, steps, rates, and logs of several lives."""

from typing import Any

import pytest

from opengyre.cells.state import CellState
from opengyre.watch.state import Phase, RunState, phase_of
from synthetic_run import Synthetic

START = {
    "t": 0.0, "kind": "run", "state": "start", "name": "demo", "policy": "elastic", "steps": 4, "seed": 3,
    "learning_rate": 1e-3, "cells": [{"cell": "core", "core": True}, {"cell": "a", "core": False}],
}  # fmt: skip


def ev(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


def step(t: float, k: int, **fields: Any) -> dict[str, Any]:
    return ev(t, "step", step=k, version=k, **{"step_s": 10.0, "pass_rate": k / 10, "excluded": 1, **fields})


def test_states_of_a_cell_become_phases() -> None:
    off = {CellState.STARTING, CellState.DEAD, CellState.STOPPED}
    roles = {CellState.ROLLOUT: Phase.ROLLOUT, CellState.TRAINING: Phase.TRAIN}
    for state in CellState:
        assert phase_of(state.value) is (Phase.OFF if state in off else roles.get(state, Phase.SWITCHING))
    assert phase_of("a later invention") is Phase.SWITCHING


def test_a_cell_holds_the_version_it_took_its_role_with() -> None:
    s = RunState([START, ev(1, "cell", cell="core", state="training"), ev(1, "cell", cell="a", state="rollout")])
    assert (s.cells["core"].version, s.cells["a"].version) == (0, 0)
    s.apply(step(9, 1))
    assert s.cells["a"].version == 1  # a serving cell pulled it before the step was committed
    s.apply(ev(10, "cell", cell="a", state="training"))
    s.apply(step(19, 2))
    assert (s.cells["core"].version, s.cells["a"].version) == (2, 1)
    s.apply(ev(20, "micro_step", step=3, micro=0, cell="a", state="claimed"))
    assert s.cells["a"].version == 2


def test_a_cell_keeps_its_time_in_role_through_switching_states() -> None:
    s = RunState([START, ev(1, "cell", cell="a", state="rollout")])
    s.apply(ev(5, "cell", cell="a", state="rollout", reason="said again"))
    assert (s.cells["a"].phase, s.cells["a"].since) == (Phase.ROLLOUT, 1)
    s.apply(ev(6, "cell", cell="a", state="draining"))
    s.apply(ev(7, "cell", cell="a", state="pulling"))
    assert (s.cells["a"].phase, s.cells["a"].since, s.cells["a"].state) == (Phase.SWITCHING, 6, "pulling")
    assert s.cells["core"].core and s.cells["core"].phase is Phase.OFF


def test_executions_are_counted_once_whatever_is_said_twice() -> None:
    done = {"execution": "x", "split": "train", "state": "done", "outcome": "finished", "sampled_tokens": 600}
    s = RunState(
        [START, ev(1, "execution", execution="x", state="queued"), ev(2, "execution", execution="x", state="running")]
    )
    assert s.executions == {"running": 1}
    s.apply(ev(30, "execution", **done))
    s.apply(ev(31, "execution", **done))
    assert s.executions == {"finished": 1} and not s.in_flight
    assert s.sampled_per_s() == pytest.approx(600 / 31)  # the run is younger than the window
    assert s.sampled_per_s(now=89) == pytest.approx(10)
    assert s.sampled_per_s(now=91) == 0


def test_micro_steps_of_the_open_step() -> None:
    s = RunState([START])
    for micro, cell in [(0, "core"), (1, "a"), (2, "a")]:
        s.apply(ev(1, "micro_step", step=1, micro=micro, cell=cell, state="claimed"))
    s.apply(ev(2, "micro_step", step=1, micro=0, cell="core", state="done", tokens=100, seconds=1.0))
    s.apply(ev(2, "micro_step", step=1, micro=1, cell="a", state="done", tokens=100, seconds=1.0))
    s.apply(ev(3, "micro_step", step=1, micro=1, cell="a", state="requeued"))
    assert (s.micro_done, s.micro_total) == (1, 3)
    s.apply(ev(4, "micro_step", step=1, micro=1, cell="core", state="claimed"))
    s.apply(ev(5, "micro_step", step=1, micro=1, cell="a", state="requeued"))  # a is too late to give it back
    s.apply(ev(6, "micro_step", step=1, micro=1, cell="core", state="done", tokens=100, seconds=1.0))
    assert (s.micro_done, s.micro_by_cell()) == (2, {"core": 2})
    s.apply(step(9, 1))
    s.apply(ev(9, "micro_step", step=1, micro=2, cell="a", state="pushed"))  # late: the step stays closed
    assert (s.micro_done, s.micro_total, s.version, s.cells["core"].version) == (0, 0, 1, 1)


def test_the_eta_is_the_median_pace_less_what_the_open_step_has_used() -> None:
    s = RunState([START, step(10, 1), step(20, 2, step_s=12.0)])
    assert s.eta_s() == pytest.approx(22)
    assert s.eta_s(now=25) == pytest.approx(17)
    assert s.eta_s(now=100) == pytest.approx(11)  # overdue: the rest of the steps
    s.apply(ev(30, "run", state="end", reason="stopped"))
    assert s.eta_s() is None and s.status == "ended"


def test_a_resumed_run_forgets_what_was_in_flight_and_redoes_steps() -> None:
    s = RunState([START, step(10, 1), step(20, 2, pass_rate=0.9), ev(21, "execution", execution="y", state="running")])
    s.apply(ev(21, "micro_step", step=3, micro=0, cell="a", state="claimed"))
    s.apply(ev(22, "run", **{k: v for k, v in START.items() if k not in ("t", "kind", "state")}, state="resume"))
    assert (s.lives, s.step, dict(s.in_flight), s.micro_total, s.waterlevel) == (2, 2, {}, 0, 0)
    s.apply(ev(23, "micro_step", step=2, micro=0, cell="a", state="claimed"))
    assert s.micro_total == 1
    s.apply(step(30, 2, pass_rate=0.4))
    assert s.trend("pass_rate") == [0.1, 0.4] and s.total("excluded") == 2


def test_unknown_kinds_and_bare_events_are_survived() -> None:
    s = RunState([{}, ev(1, "later invention", x=1)])
    for kind in (
        "run",
        "cell",
        "switch",
        "waterlevel",
        "query",
        "execution",
        "micro_step",
        "step",
        "eval",
        "decision",
        "note",
    ):
        s.apply(ev(2, kind))
    assert s.t == 2


def test_a_whole_run() -> None:
    events = Synthetic(steps=3, held_out=(4, 2)).run()
    s = RunState(events)
    done = [e for e in events if e["kind"] == "execution" and e["state"] == "done"]
    assert (s.status, s.step, s.version, s.waterlevel, s.in_flight) == ("ended", 3, 3, 0, {})
    assert sum(s.executions.values()) == len(done) == 3 * 32 + 2 * 8
    assert s.total("excluded") == sum(e["reward"] is None for e in done)
    assert sum(len(x.seconds) for x in s.switches.values()) == sum(e["kind"] == "switch" for e in events) > 0
    assert [e["version"] for e in s.evals] == [0, 3]
