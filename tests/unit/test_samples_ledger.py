"""Claims: each micro-step is counted exactly once, whatever cells do (SPEC §3.8)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from opengyre.errors import TrainingError
from opengyre.samples.ledger import Claim, MicroState, StepLedger, Verdict

ACCEPTED, DUPLICATE, REFUSED = Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.REFUSED


def ledger(n: int, *, lease_s: float = 10.0, close: bool = True) -> StepLedger[str]:
    """A step of version 7 with n micro-steps."""
    made: StepLedger[str] = StepLedger(7, lease_s)
    for i in range(n):
        made.add(f"m{i}")
    if close:
        made.close()
    return made


def got(claim: Claim[str] | None) -> Claim[str]:
    """The claim, which must be there."""
    assert claim is not None
    return claim


def test_the_plain_way() -> None:
    step = ledger(2)
    first, second = got(step.claim("a", 0.0)), got(step.claim("b", 0.0))
    assert (first.micro, second.micro, step.claim("a", 0.0)) == ("m0", "m1", None)
    assert step.finish_local("a", first.claim_id, "stats0")
    assert step.finish_local("b", second.claim_id, "stats1")
    assert step.push("b", 0, [second.claim_id], 7) is ACCEPTED
    assert not step.complete
    assert step.push("a", 0, [first.claim_id], 7) is ACCEPTED
    assert step.complete
    assert step.results() == ["stats0", "stats1"]


def test_an_open_step_is_not_complete_even_when_all_is_counted() -> None:
    step = ledger(0, close=False)
    assert not step.complete
    step.close()
    assert step.complete  # a step of degenerate groups has nothing to compute
    with pytest.raises(TrainingError, match="closed"):
        step.add("late")


def test_a_push_sent_twice_counts_once() -> None:
    step = ledger(1)
    claim = got(step.claim("a", 0.0))
    step.finish_local("a", claim.claim_id)
    assert [step.push("a", 3, [claim.claim_id], 7) for _ in range(3)] == [ACCEPTED, DUPLICATE, DUPLICATE]
    assert (step.counts.pushes, step.counts.duplicates) == (1, 2)


def test_a_cell_that_came_back_may_use_a_flush_number_again() -> None:
    step = ledger(2)
    first = got(step.claim("a", 0.0))
    step.finish_local("a", first.claim_id)
    assert step.push("a", 0, [first.claim_id], 7) is ACCEPTED
    step.lose("a")
    step.join("a")
    second = got(step.claim("a", 0.0))
    step.finish_local("a", second.claim_id)
    assert step.push("a", 0, [second.claim_id], 7) is ACCEPTED
    assert step.complete


def test_a_late_push_counts_while_nobody_took_over() -> None:
    step = ledger(1)
    claim = got(step.claim("a", 0.0))
    step.finish_local("a", claim.claim_id)
    assert [c.claim_id for c in step.expire(10.0)] == [claim.claim_id]
    assert (step.claimable, step.claim("a", 11.0)) == (1, None)  # not to the slow cell itself
    assert step.push("a", 0, [claim.claim_id], 7) is ACCEPTED
    assert step.complete


def test_a_late_push_is_refused_whole_once_one_of_it_was_taken_over() -> None:
    step = ledger(2)
    slow = [got(step.claim("a", 0.0)), got(step.claim("a", 5.0))]
    for claim in slow:
        step.finish_local("a", claim.claim_id)
    taken = got(step.claim("b", 12.0))
    assert (taken.micro, taken.attempt) == ("m0", 2)
    assert step.push("a", 0, [c.claim_id for c in slow], 7) is REFUSED
    assert step.number(MicroState.CLAIMABLE) == 1  # m1 was in the sum that a has to drop
    rest = got(step.claim("b", 12.0))
    for claim in (taken, rest):
        step.finish_local("b", claim.claim_id)
    assert step.push("b", 0, [taken.claim_id, rest.claim_id], 7) is ACCEPTED
    assert step.complete
    assert step.push("a", 0, [c.claim_id for c in slow], 7) is REFUSED


def test_work_that_was_taken_over_spoils_the_local_sum_it_entered() -> None:
    step = ledger(2)
    held, slow = got(step.claim("a", 9.0)), got(step.claim("a", 0.0))
    step.finish_local("a", held.claim_id)
    assert got(step.claim("b", 10.0)).micro == "m1"
    assert not step.finish_local("a", slow.claim_id)
    assert (step.counts.spoiled, step.claims_of("a"), step.number(MicroState.CLAIMABLE)) == (1, [], 1)


def test_progress_renews_the_lease_and_the_core_has_none() -> None:
    step = ledger(3)
    first = got(step.claim("a", 0.0))
    step.finish_local("a", first.claim_id, now=8.0)
    assert step.next_deadline() == 18.0
    assert step.expire(12.0) == []
    got(step.claim("core", 0.0, endless=True))
    assert [c.cell for c in step.expire(1e9)] == ["a"]


@pytest.mark.parametrize("version", [6, 8])
def test_a_push_for_another_version_is_refused(version: int) -> None:
    step = ledger(1)
    claim = got(step.claim("a", 0.0))
    step.finish_local("a", claim.claim_id)
    assert step.push("a", 0, [claim.claim_id], version) is REFUSED
    assert step.claimable == 1


def test_foreign_unknown_unfinished_and_empty_pushes_are_refused() -> None:
    step = ledger(2)
    mine, other = got(step.claim("a", 0.0)), got(step.claim("b", 0.0))
    step.finish_local("b", other.claim_id)
    assert step.push("a", 0, [other.claim_id], 7) is REFUSED
    assert step.push("a", 0, ["7.0.99"], 7) is REFUSED
    assert step.push("a", 0, [], 7) is REFUSED
    assert step.push("a", 0, [mine.claim_id], 7) is REFUSED  # never finished
    assert step.push("b", 0, [other.claim_id], 7) is ACCEPTED


def test_a_sum_the_core_refuses_is_computed_again() -> None:
    step = ledger(1)
    claim = got(step.claim("a", 0.0))
    step.finish_local("a", claim.claim_id)
    step.push("a", 0, [claim.claim_id], 7)
    step.revoke("a", 0, [claim.claim_id])
    assert (step.complete, step.claimable) == (False, 1)
    assert step.push("a", 0, [claim.claim_id], 7) is REFUSED
    with pytest.raises(TrainingError, match="no push 0"):
        step.revoke("a", 0, [claim.claim_id])


def test_leaving_after_a_flush_requeues_nothing() -> None:
    step = ledger(2)
    claim = got(step.claim("a", 0.0))
    step.finish_local("a", claim.claim_id)
    step.push("a", 0, [claim.claim_id], 7)
    assert step.leave("a") == 0
    got(step.claim("a", 0.0))
    assert step.leave("a") == 1


def test_after_the_cores_death_nothing_of_the_step_is_left() -> None:
    step = ledger(2)
    counted, held = got(step.claim("a", 0.0)), got(step.claim("b", 0.0))
    for claim in (counted, held):
        step.finish_local(claim.cell, claim.claim_id)
    step.push("a", 0, [counted.claim_id], 7)
    step.core_reset()
    assert (step.claimable, step.results()) == (2, [])
    assert step.push("a", 0, [counted.claim_id], 7) is REFUSED  # a re-sent push must not pass for counted
    assert step.push("b", 0, [held.claim_id], 7) is REFUSED


class Core:
    """The core's sum, as numbers: how often each micro-step is in it."""

    def __init__(self) -> None:
        self.sum: Counter[str] = Counter()


class Cell:
    """A cell as it really is: a local sum, claims in work, a flush number; all gone when it dies."""

    def __init__(self, name: str) -> None:
        self.name, self.flush_no = name, 0
        self.local: Counter[str] = Counter()
        self.held: list[str] = []
        self.work: list[Claim[str]] = []


class Step(RuleBasedStateMachine):
    """Cells join, compute, die, come back; pushes arrive late, twice or never; the core dies; leases run out."""

    @initialize(n=st.integers(1, 6))
    def start(self, n: int) -> None:
        self.now, self.n = 0.0, n
        self.ledger = ledger(n)
        self.core = Core()
        self.cells: dict[str, Cell] = {}
        self.wire: list[tuple[Cell, int, tuple[str, ...], Counter[str]]] = []  # pushes sent; each may arrive often

    @rule(name=st.sampled_from("abc"))
    def join_or_come_back(self, name: str) -> None:
        self.ledger.join(name)
        self.cells[name] = Cell(name)

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        cell = self._cell(data)
        claim = self.ledger.claim(cell.name, self.now)
        if claim is not None:
            cell.work.append(claim)

    @precondition(lambda self: any(c.work for c in self.cells.values()))
    @rule(data=st.data(), alive=st.booleans())
    def finish(self, data: st.DataObject, alive: bool) -> None:
        cell = data.draw(st.sampled_from([c for c in self.cells.values() if c.work]))
        claim = cell.work.pop(0)
        if self.ledger.finish_local(cell.name, claim.claim_id, claim.micro, now=self.now if alive else None):
            cell.local[claim.micro] += 1
            cell.held.append(claim.claim_id)
        else:
            cell.local, cell.held = Counter(), []

    @precondition(lambda self: any(c.held for c in self.cells.values()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from([c for c in self.cells.values() if c.held]))
        self.wire.append((cell, cell.flush_no, tuple(cell.held), cell.local))
        cell.flush_no, cell.local, cell.held = cell.flush_no + 1, Counter(), []

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A push arrives; it stays on the wire and may arrive again, even after its cell's death."""
        cell, flush_no, claims, gradients = data.draw(st.sampled_from(self.wire))
        if self.ledger.push(cell.name, flush_no, claims, 7) is ACCEPTED:
            self.core.sum += gradients

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        cell = self._cell(data)
        self.ledger.lose(cell.name)
        del self.cells[cell.name]

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        cell = self._cell(data)
        self.ledger.leave(cell.name)
        del self.cells[cell.name]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @rule()
    def core_dies(self) -> None:
        self.ledger.core_reset()
        self.core = Core()

    def _cell(self, data: st.DataObject) -> Cell:
        return data.draw(st.sampled_from(list(self.cells.values())))

    def check(self) -> None:
        counted = self.ledger.number(MicroState.COUNTED)
        assert sum(self.core.sum.values()) == counted == len(self.ledger.results())
        assert set(self.core.sum.values()) <= {1}
        assert set(self.ledger.results()) == set(self.core.sum)

    def teardown(self) -> None:
        """From anywhere, one healthy cell brings the step to its end, and the sum is that of one process in order."""
        if not hasattr(self, "ledger"):
            return
        self.check()
        self.ledger.join("z")
        flush, now = 0, self.now + 100.0
        while (claim := self.ledger.claim("z", now)) is not None:
            assert self.ledger.finish_local("z", claim.claim_id, claim.micro)
            assert self.ledger.push("z", flush, [claim.claim_id], 7) is ACCEPTED
            self.core.sum[claim.micro] += 1
            flush += 1
        assert self.ledger.complete
        for cell, flush_no, claims, _ in self.wire:
            assert self.ledger.push(cell.name, flush_no, claims, 7) is not ACCEPTED
        assert self.core.sum == Counter({f"m{i}": 1 for i in range(self.n)})


Step.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestStep = Step.TestCase
