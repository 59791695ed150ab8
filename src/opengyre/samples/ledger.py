"""Who computes which micro-step of the open step, and which gradients count: each micro-step exactly once (SPEC §3.8).

    add ─▶ CLAIMABLE ── claim ─▶ CLAIMED ── finish_local ─▶ HELD ── push ─▶ COUNTED ── all, and closed ─▶ complete
               ▲                    │  lease over              │                │
               │                    ▼                          │                │
               ├── claim by another: LATE ◀────────────────────┘                │
               └── lose, leave, spoiled sum, core_reset, revoke ────────────────┘

A *claim* is the right to have one micro-step counted; its id is never used again, so what a dead cell, an earlier life
of a cell or a cell that was too slow still sends finds no claim and is refused whole. A micro-step has at most one
claim at any time, and only its claim can make it COUNTED: that is the proof of "at most once"; "at least once" is that
every way to lose a claim leads back to CLAIMABLE and that ``complete`` waits for all.

A lease that runs out does not end the claim, it only lets another cell take the micro-step over (LATE). A push that
comes late while nobody did is counted: the work is done, and refusing it would compute it twice. Once taken over, the
old claim is gone, and the push that contains it is refused whole, for a sum cannot be taken apart. Then everything the
slow cell held in that sum is claimable again, and the cell has to drop the sum.

A cell's protocol: join with an empty local sum; claim, compute, finish_local, where False means "your local sum holds
work that is no longer yours: drop it"; push now and then, where REFUSED means the same. The core adds a pushed sum only
on ACCEPTED, and only between ``push`` and the next call here, so that sum and ledger never differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from opengyre.errors import TrainingError

T = TypeVar("T")


class MicroState(StrEnum):
    """Life of a micro-step."""

    CLAIMABLE = "claimable"
    CLAIMED = "claimed"  # a cell computes it
    HELD = "held"  # it is in a cell's local sum
    LATE = "late"  # its lease ran out: it goes to whoever comes first, its holder's push or another claim
    COUNTED = "counted"  # it is in the core's sum


_S = MicroState
_NEXT: dict[MicroState, frozenset[MicroState]] = {
    _S.CLAIMABLE: frozenset({_S.CLAIMED}),
    _S.CLAIMED: frozenset({_S.HELD, _S.LATE, _S.CLAIMABLE}),
    _S.HELD: frozenset({_S.COUNTED, _S.LATE, _S.CLAIMABLE}),
    _S.LATE: frozenset({_S.COUNTED, _S.CLAIMED, _S.HELD, _S.CLAIMABLE}),
    _S.COUNTED: frozenset({_S.CLAIMABLE}),
}


class Claim(msgspec.Struct, Generic[T], frozen=True):
    """The right of ``cell`` to have micro-step ``micro_id`` counted. ``deadline_s`` is None for a lease without end.

    ``attempt`` counts from 1; many attempts at one micro-step point at its data, not at the cells.
    """

    claim_id: str
    micro_id: int
    micro: T
    cell: str
    deadline_s: float | None
    attempt: int


class Verdict(StrEnum):
    """What became of a push."""

    ACCEPTED = "accepted"  # counted: the core adds the sum
    DUPLICATE = "duplicate"  # counted by this very push before: the core adds nothing, the cell is fine
    REFUSED = "refused"  # nothing is counted: the cell drops the sum


class LedgerCounts(msgspec.Struct):
    """What happened in one step; micro-steps unless said otherwise."""

    claims: int = 0
    late: int = 0
    taken_over: int = 0
    lost: int = 0  # requeued because their cell died
    left: int = 0  # requeued because their cell left with work not pushed
    spoiled: int = 0  # requeued because they shared a sum with a claim that was gone
    revoked: int = 0
    pushes: int = 0  # pushes accepted
    duplicates: int = 0  # pushes seen before
    refused: int = 0  # pushes refused
    core_resets: int = 0


class _Micro(Generic[T]):
    """One micro-step; ``state`` changes only through ``move``."""

    __slots__ = ("_state", "attempts", "claim", "computed", "micro", "micro_id", "result")

    def __init__(self, micro_id: int, micro: T) -> None:
        self.micro_id, self.micro = micro_id, micro
        self._state = MicroState.CLAIMABLE
        self.claim: Claim[T] | None = None
        self.computed = False  # finish_local was heard for the present claim
        self.result: Any = None
        self.attempts = 0

    @property
    def state(self) -> MicroState:
        return self._state

    def move(self, to: MicroState) -> None:
        if to not in _NEXT[self._state]:
            raise TrainingError(f"cannot go from {self._state} to {to}", where=f"micro-step {self.micro_id}")
        self._state = to

    def requeue(self) -> None:
        self.move(MicroState.CLAIMABLE)
        self.claim, self.computed, self.result = None, False, None


class StepLedger(Generic[T]):
    """The claims of one open step.

    Args:
        version: weights version that the step trains; pushes for another version are refused.
        lease_s: how long a cell may hold a claim before others may take it over.
        life: tells restarts of the whole controller within one version apart, so that no claim id comes back.
    """

    def __init__(self, version: int, lease_s: float = 120.0, *, life: int = 0) -> None:
        self.version, self.lease_s = version, lease_s
        self.counts = LedgerCounts()
        self._life, self._closed, self._claims = life, False, 0
        self._micros: list[_Micro[T]] = []
        self._by_claim: dict[str, _Micro[T]] = {}  # living claims of micro-steps that are not counted
        self._pushed: set[tuple[str, int, frozenset[str]]] = set()

    def add(self, micro: T) -> int:
        """Add a micro-step; returns its id. Raises TrainingError after ``close``."""
        if self._closed:
            raise TrainingError("got a micro-step after it was closed", where=f"step {self.version}")
        self._micros.append(_Micro(len(self._micros), micro))
        return len(self._micros) - 1

    def close(self) -> None:
        """No more micro-steps will come."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """True once no more micro-steps will come."""
        return self._closed

    @property
    def complete(self) -> bool:
        """True when closed and every micro-step is counted."""
        return self._closed and all(m.state is MicroState.COUNTED for m in self._micros)

    def number(self, *states: MicroState) -> int:
        """How many micro-steps are in one of ``states`` (none given: all)."""
        return sum(not states or m.state in states for m in self._micros)

    @property
    def claimable(self) -> int:
        """Micro-steps that a claim could get now."""
        return self.number(MicroState.CLAIMABLE, MicroState.LATE)

    def results(self) -> list[Any]:
        """What ``finish_local`` reported for the counted micro-steps, once each, in the order they were added."""
        return [m.result for m in self._micros if m.state is MicroState.COUNTED]

    def claims_of(self, cell: str) -> list[Claim[T]]:
        """Living, uncounted claims of a cell, oldest micro-step first."""
        return [m.claim for m in self._owned(cell) if m.claim is not None]

    def claim(self, cell: str, now: float, *, endless: bool = False) -> Claim[T] | None:
        """Give ``cell`` a micro-step, fresh ones before late ones; None when there is none to have now.

        ``endless``: no lease. For the core, whose local sum *is* the authoritative one: it cannot be taken apart or
        dropped, and its death is ``core_reset``. A cell's own late claim is not offered to it again.
        """
        self.expire(now)
        fresh = (m for m in self._micros if m.state is MicroState.CLAIMABLE)
        late = (m for m in self._micros if m.state is MicroState.LATE and m.claim and m.claim.cell != cell)
        micro = next(fresh, None) or next(late, None)
        if micro is None:
            return None
        if micro.claim is not None:
            self.counts.taken_over += 1
            del self._by_claim[micro.claim.claim_id]
        micro.move(MicroState.CLAIMED)
        micro.attempts += 1
        self._claims += 1
        claim_id = f"{self.version}.{self._life}.{self._claims}"
        deadline = None if endless else now + self.lease_s
        micro.claim = Claim(claim_id, micro.micro_id, micro.micro, cell, deadline, micro.attempts)
        micro.computed, micro.result = False, None
        self._by_claim[claim_id] = micro
        self.counts.claims += 1
        return micro.claim

    def finish_local(self, cell: str, claim_id: str, result: Any = None, *, now: float | None = None) -> bool:
        """The micro-step is in the cell's local sum. ``result`` is kept for ``results``.

        ``now``: progress is proof of life, and renews the lease of all that the cell holds. False: the claim is gone,
        so the cell must drop its local sum; the rest of that sum is claimable again.
        """
        micro = self._mine(cell, claim_id)
        if micro is None:
            self.counts.spoiled += self._requeue(m for m in self._owned(cell) if m.computed)
            return False
        if micro.state is MicroState.CLAIMED:
            micro.move(MicroState.HELD)
        micro.computed, micro.result = True, result
        if now is not None:
            self._renew(cell, now)
        return True

    def push(self, cell: str, flush_no: int, claim_ids: Iterable[str], version: int) -> Verdict:
        """Count a cell's sum over the micro-steps of ``claim_ids``, all or nothing.

        A push is the same as one before if cell, number *and* claims agree: a cell that came back counts its flushes
        from the start again. What of a refused push was still the cell's is claimable again.
        """
        claims = frozenset(claim_ids)
        if (cell, flush_no, claims) in self._pushed:
            self.counts.duplicates += 1
            return Verdict.DUPLICATE
        mine = [self._mine(cell, claim_id) for claim_id in claims]
        good = [m for m in mine if m is not None and m.computed]
        if version != self.version or not claims or len(good) != len(claims):
            self.counts.refused += 1
            self.counts.spoiled += self._requeue(m for m in mine if m is not None)
            return Verdict.REFUSED
        for micro in good:
            micro.move(MicroState.COUNTED)
            if micro.claim is not None:
                del self._by_claim[micro.claim.claim_id]
        self._pushed.add((cell, flush_no, claims))
        self.counts.pushes += 1
        return Verdict.ACCEPTED

    def revoke(self, cell: str, flush_no: int, claim_ids: Iterable[str]) -> None:
        """The core refused the sum of an accepted push (not finite, torn): its micro-steps are claimable again."""
        claims = frozenset(claim_ids)
        if (cell, flush_no, claims) not in self._pushed:
            raise TrainingError(f"no push {flush_no} of these claims was accepted", where=f"cell {cell}")
        self._pushed.remove((cell, flush_no, claims))
        self.counts.revoked += self._requeue(m for m in self._micros if m.claim and m.claim.claim_id in claims)

    def join(self, cell: str) -> int:
        """A cell enters the step with an empty local sum: what an earlier life of it still held is claimable again."""
        return self.lose(cell)

    def lose(self, cell: str) -> int:
        """The cell died: what it had not pushed is claimable again; returns how many micro-steps that is."""
        lost = self._requeue(self._owned(cell))
        self.counts.lost += lost
        return lost

    def leave(self, cell: str) -> int:
        """The cell left the training role in order; returns how many micro-steps it had not pushed: 0 if it flushed."""
        left = self._requeue(self._owned(cell))
        self.counts.left += left
        return left

    def expire(self, now: float) -> list[Claim[T]]:
        """Let others have the micro-steps whose lease ran out; returns the claims that are newly late."""
        late: list[Claim[T]] = []
        for micro in self._micros:
            if micro.claim is None or micro.state not in (MicroState.CLAIMED, MicroState.HELD):
                continue
            if micro.claim.deadline_s is not None and now >= micro.claim.deadline_s:
                micro.move(MicroState.LATE)
                late.append(micro.claim)
        self.counts.late += len(late)
        return late

    def next_deadline(self) -> float | None:
        """When ``expire`` next has something to do, seconds on the caller's clock; None: never."""
        claims = (m.claim for m in self._micros if m.state in (MicroState.CLAIMED, MicroState.HELD))
        return min((c.deadline_s for c in claims if c is not None and c.deadline_s is not None), default=None)

    def core_reset(self) -> None:
        """The core died and with it every sum of this step: all of it is claimable again, all claims are gone."""
        self.counts.core_resets += 1
        self._requeue(m for m in self._micros if m.state is not MicroState.CLAIMABLE)
        self._pushed.clear()

    def _renew(self, cell: str, now: float) -> None:
        for micro in self._owned(cell):
            if micro.claim is None or micro.claim.deadline_s is None:
                continue
            micro.claim = msgspec.structs.replace(micro.claim, deadline_s=now + self.lease_s)
            if micro.state is MicroState.LATE:
                micro.move(MicroState.HELD if micro.computed else MicroState.CLAIMED)

    def _owned(self, cell: str) -> list[_Micro[T]]:
        return [m for m in self._micros if m.claim and m.claim.cell == cell and m.state is not MicroState.COUNTED]

    def _mine(self, cell: str, claim_id: str) -> _Micro[T] | None:
        micro = self._by_claim.get(claim_id)
        if micro is None or micro.claim is None or (micro.claim.claim_id, micro.claim.cell) != (claim_id, cell):
            return None
        return micro

    def _requeue(self, micros: Iterable[_Micro[T]]) -> int:
        number = 0
        for micro in list(micros):
            if micro.claim is not None:
                self._by_claim.pop(micro.claim.claim_id, None)
            micro.requeue()
            number += 1
        return number
