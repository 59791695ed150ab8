"""One optimizer step while it is open: micro-steps appear as groups complete, cells claim them, sums reach the core.

    add_group ─▶ ledger ─▶ claim ─▶ (a cell computes) ─▶ computed ─▶ hand_over ─▶ core
                   ▲                                                    │
                   └── lose / expire / revoke / core_reset ◀────────────┘   claimable again

The ledger is pure (samples/ledger.py); this class adds the clock, the event log and the pulse that wakes whoever waits
for a claim or for the end of the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from opengyre.cells.pulse import Pulse
from opengyre.samples.ledger import Claim, MicroState, StepLedger, Verdict
from opengyre.samples.types import Sample
from opengyre.training.base import MicroStats
from opengyre.watch.events import EventLog

MicroClaim = Claim[list[Sample]]


class OpenStep:
    """Step ``number``, on weights ``version``. The pulse beats whenever something became claimable or was counted."""

    def __init__(
        self,
        number: int,
        version: int,
        *,
        lease_s: float,
        life: int,
        pulse: Pulse,
        events: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self.number, self.version = number, version
        self.executions = 0  # valid executions so far: E of the loss, final when the step closes
        self.samples = 0
        self._ledger: StepLedger[list[Sample]] = StepLedger(version, lease_s, life=life)
        self._pulse, self._events, self._clock = pulse, events, clock

    def add_group(self, micro_steps: Sequence[list[Sample]], executions: int) -> None:
        """A completed group joins: its micro-steps are claimable from now on."""
        self.executions += executions
        for samples in micro_steps:
            self.samples += len(samples)
            self._ledger.add(samples)
        self._pulse.beat()

    def close(self) -> None:
        """No further group joins."""
        self._ledger.close()
        self._pulse.beat()

    @property
    def claimable(self) -> int:
        """Micro-steps that a claim could get now."""
        return self._ledger.claimable

    @property
    def claimed(self) -> int:
        """Micro-steps being computed or held in a cell's sum."""
        return self._ledger.number(MicroState.CLAIMED, MicroState.HELD)

    @property
    def micro_step_s(self) -> float | None:
        """What a micro-step of this step took so far, median seconds."""
        took = [stats.seconds for stats in self.stats()]
        return statistics.median(took) if took else None

    @property
    def micro_steps(self) -> int:
        """Micro-steps so far."""
        return self._ledger.number()

    @property
    def closed(self) -> bool:
        """True once no further group joins."""
        return self._ledger.closed

    @property
    def complete(self) -> bool:
        """Closed, and every micro-step's gradient is in the core's sum."""
        return self._ledger.complete

    def stats(self) -> list[MicroStats]:
        """What the counted micro-steps reported, once each."""
        return self._ledger.results()

    def claim(self, cell: str, *, core: bool) -> MicroClaim | None:
        """Lease one micro-step to ``cell``, or None if there is none to have now. The core's lease has no end."""
        claim = self._ledger.claim(cell, self._clock(), endless=core)
        if claim is not None:
            self._emit(claim, "claimed", tokens=sum(len(s.ids) for s in claim.micro))
        return claim

    def computed(self, claim: MicroClaim, stats: MicroStats) -> bool:
        """The gradient of ``claim`` is in its cell's sum. False: the claim is gone, the cell must drop its sum."""
        held = self._ledger.finish_local(claim.cell, claim.claim_id, stats, now=self._clock())
        self._emit(claim, "done" if held else "requeued", tokens=stats.tokens, seconds=stats.seconds)
        if not held:
            self._pulse.beat()
        return held

    def hand_over(self, cell: str, number: int, claims: Sequence[MicroClaim]) -> bool:
        """Count ``cell``'s sum over exactly ``claims``. False: it must be dropped."""
        verdict = self._ledger.push(cell, number, [c.claim_id for c in claims], self.version)
        for claim in claims:
            self._emit(claim, "pushed" if verdict is Verdict.ACCEPTED else "requeued")
        self._pulse.beat()
        return verdict is Verdict.ACCEPTED

    def revoke(self, cell: str, number: int, claims: Sequence[MicroClaim]) -> None:
        """The core could not take a sum that was handed over: its micro-steps are claimable again."""
        self._ledger.revoke(cell, number, [c.claim_id for c in claims])
        self._pulse.beat()

    def lose(self, cell: str) -> None:
        """``cell`` is gone, or comes with an empty sum: what it had not handed over is claimable again."""
        self._ledger.lose(cell)
        self._pulse.beat()

    def core_reset(self) -> None:
        """The core lost its sums: everything of this step is claimable again."""
        self._ledger.core_reset()
        self._pulse.beat()

    def expire(self) -> None:
        """Let others have what a cell was too slow with."""
        if self._ledger.expire(self._clock()):
            self._pulse.beat()

    def _emit(self, claim: MicroClaim, state: str, **figures: float) -> None:
        self._events.emit("micro_step", step=self.number, micro=claim.micro_id, cell=claim.cell, state=state, **figures)
