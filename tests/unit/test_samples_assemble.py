"""Step assembly and admission: never beyond the staleness bound, never stuck, across drops and resumes. Case C07."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opengyre.errors import ConfigError, TrainingError
from opengyre.samples.assemble import Assembler, AssemblerState, Pending


def fill(a: Assembler, prefix: str) -> list[str]:
    """Admit all that may be."""
    names = [f"{prefix}{i}" for i in range(a.admissible())]
    for name in names:
        a.admit(name)
    return names


def test_c07_capacity_after_a_resume_is_relative_to_what_is_pending() -> None:
    state = AssemblerState(version=50, admitted=400, trained=400)
    assert Assembler(8, 1, state=state).admissible() == 16


def test_c07_no_staleness_and_a_dropped_query_still_progresses() -> None:
    a = Assembler(2, 0)
    for name in ("x", "y"):
        a.admit(name)
    assert a.admissible() == 0
    a.drop("x")
    assert a.admissible() == 1  # the place is given back; the query is not
    a.admit("z")
    a.complete("y")
    a.complete("z")
    assert a.take() == ["y", "z"]
    assert (a.step_full, a.commit(), a.dropped, a.admitted) == (True, 1, 1, 3)


def test_a_completed_group_joins_the_open_step_at_once() -> None:
    a = Assembler(2, 1)
    names = fill(a, "q")
    assert len(names) == 4
    a.complete("q3")
    assert (a.take(), a.missing) == (["q3"], 1)
    a.complete("q1")
    assert (a.take(), a.step_full) == (["q1"], True)
    a.complete("q0")
    assert (a.take(), a.ready) == ([], ["q0"])  # full: it waits
    a.commit()
    assert a.take() == ["q0"]


def test_places_are_kept_for_groups_that_are_due_earlier_than_the_next_step() -> None:
    """q = 1, s = 2: B and C are due at 2. Were D (due at 3) to join step 1, one of them would be stale."""
    a = Assembler(1, 2)
    for name in "ABC":
        a.admit(name)
    a.complete("A")
    assert a.take() == ["A"]
    a.commit()
    a.admit("D")
    a.complete("D")
    assert a.take() == []
    a.complete("B")
    assert a.take() == ["B"]
    a.commit()
    assert a.take() == []
    a.complete("C")
    assert a.take() == ["C"]
    a.commit()
    assert a.take() == ["D"]


def test_nothing_is_admitted_that_no_step_could_train() -> None:
    a = Assembler(2, 3, steps=2)
    assert a.admissible() == 4
    fill(a, "q")
    for name in ("q0", "q1", "q2", "q3"):
        a.complete(name)
    a.take()
    assert a.commit() == 1
    assert a.admissible() == 0


def test_a_query_admitted_while_cells_still_serve_old_weights_is_due_earlier() -> None:
    a = Assembler(1, 1, state=AssemblerState(version=5))
    assert (a.admissible(serving=4), a.admissible(serving=3), a.admissible()) == (1, 0, 2)
    a.admit("q", serving=4)
    assert a.state().pending[0].due == 5


def test_a_group_older_than_its_admission_is_dropped_when_no_place_is_left_for_it() -> None:
    a = Assembler(1, 1, state=AssemblerState(version=5))
    a.admit("x")
    a.admit("y")
    assert a.complete("x", oldest_version=4)  # due now, and there is room now
    assert a.take() == ["x"]
    assert not a.complete("y", oldest_version=4)  # due now too, and the step is full
    assert (a.dropped, a.running, a.ready) == (1, [], [])


def test_a_resume_with_a_lower_bound_is_refused() -> None:
    state = AssemblerState(version=3, pending=[Pending(f"q{i}", due=4) for i in range(3)])
    with pytest.raises(ConfigError, match="max_staleness"):
        Assembler(1, 1, state=state)


def test_misuse_is_named() -> None:
    a = Assembler(1, 0)
    a.admit("x")
    with pytest.raises(TrainingError, match="already in progress"):
        a.admit("x")
    with pytest.raises(TrainingError, match="run ahead"):
        a.admit("y")
    with pytest.raises(TrainingError, match="not in progress"):
        a.complete("y")
    with pytest.raises(TrainingError, match="0 of 1 groups"):
        a.commit()
    a.complete("x")
    with pytest.raises(TrainingError, match="not in progress"):
        a.complete("x")


class Run(RuleBasedStateMachine):
    """Any order of admission, completion, drops, restarts, kills and commits."""

    @initialize(q=st.integers(1, 3), s=st.integers(0, 3), steps=st.one_of(st.none(), st.integers(1, 6)))
    def start(self, q: int, s: int, steps: int | None) -> None:
        self.q, self.s, self.steps = q, s, steps
        self.a = Assembler(q, s, steps=steps)
        self.names = 0
        self.oldest: dict[str, int] = {}  # the oldest version each query can have been sampled on
        self.trained: list[str] = []
        self.gone: set[str] = set()
        self.saved: AssemblerState | None = None

    @precondition(lambda self: self.a.admissible() > 0)
    @rule(lag=st.integers(0, 2))
    def admit(self, lag: int) -> None:
        serving = max(0, self.a.version - lag)
        if self.a.admissible(serving) > 0:
            name = f"q{self.names}"
            self.names += 1
            self.a.admit(name, serving)
            self.oldest[name] = serving

    @precondition(lambda self: self.a.running)
    @rule(data=st.data(), late=st.booleans())
    def complete(self, data: st.DataObject, late: bool) -> None:
        name = data.draw(st.sampled_from(self.a.running))
        oldest = self.oldest[name] - late  # now and then a cell served older weights than it said
        if self.a.complete(name, max(0, oldest)):
            self.oldest[name] = max(0, oldest)
        else:
            self.gone.add(name)

    @precondition(lambda self: self.a.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.a.running))
        self.a.drop(name)
        self.gone.add(name)

    @precondition(lambda self: self.a.running)
    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.a.running))
        self.a.readmit(name)
        self.oldest[name] = self.a.version

    @rule()
    def take(self) -> None:
        before = self.a.step_groups
        joined = self.a.take()
        assert self.a.step_groups == before + joined

    @precondition(lambda self: self.a.step_full)
    @rule()
    def commit(self) -> None:
        groups, at = self.a.step_groups, self.a.version
        assert len(groups) == self.q
        assert all(at - self.oldest[name] <= self.s for name in groups)
        self.trained += groups
        assert self.a.commit() == at + 1

    @rule()
    def kill_and_resume(self) -> None:
        state = msgspec.json.decode(msgspec.json.encode(self.a.state()), type=AssemblerState)
        self.a = Assembler(self.q, self.s, steps=self.steps, state=state)

    @invariant()
    def every_query_is_in_one_place(self) -> None:
        assert self.a.waiting == len(self.a.ready)
        places = [*self.trained, *self.gone, *self.a.step_groups, *self.a.running, *self.a.ready]
        assert sorted(places) == sorted(f"q{i}" for i in range(self.names))
        assert (self.a.trained, self.a.dropped, self.a.admitted) == (len(self.trained), len(self.gone), self.names)

    @invariant()
    def it_is_never_stuck(self) -> None:
        """When nothing runs and nothing more may be admitted, the step fills and commits - or the run is over."""
        if self.steps is not None and self.a.version >= self.steps:
            assert self.a.admissible() == 0
            return
        if not self.a.running and self.a.admissible() == 0:
            copy = Assembler(self.q, self.s, steps=self.steps, state=self.a.state())
            copy.take()
            assert copy.step_full

    @invariant()
    def nothing_is_overdue(self) -> None:
        assert all(p.due >= self.a.version for p in self.a.state().pending)


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRun = Run.TestCase
