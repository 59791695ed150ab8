"""The engine of one simulated cell: every call in its batch advances by one token a decode step.

Virtual time is the number of decode steps since the start. A call that needs n tokens ends n steps later, whatever the
batch does meanwhile, so calls keep their order in a heap and a change of the batch costs O(log calls):

    add / remove / stall ─▶ advance(now): steps += elapsed / step_s ─▶ new step_s ─▶ when does the first call end?
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from opengyre.simulate.cost import CostModel
from opengyre.simulate.script import Execution


@dataclass(slots=True, eq=False)
class Engine:
    """``t`` is when it decodes next: later than now while it prefills or pulls weights."""

    cost: CostModel
    slots: int
    calls: int = 0
    context: float = 0.0  # tokens of all calls
    epoch: int = 0  # a prefix cached in an earlier epoch is gone
    changes: int = 0  # makes an older expectation of ``next_end`` void
    t: float = 0.0
    steps: float = 0.0
    sampled: float = 0.0  # tokens so far
    step_s: float = 1.0
    slowdown: float = 1.0  # of everything, by what shares the machine
    _heap: list[tuple[float, int, Execution]] = field(default_factory=list)
    _pushed: int = 0

    @property
    def fill(self) -> float:
        """Calls per slot."""
        return self.calls / self.slots

    def add(self, now: float, execution: Execution, prefill_tokens: float) -> None:
        """Start a call, or go on with it: ``execution.tokens_left`` tokens are to be sampled."""
        self.advance(now)
        self.stall(self.cost.prefill_s(prefill_tokens))
        execution.end_step = self.steps + execution.tokens_left
        execution.engine = self
        self._pushed += 1
        heapq.heappush(self._heap, (execution.end_step, self._pushed, execution))
        self._changed(1, execution.context)

    def remove(self, now: float, execution: Execution) -> None:
        """Stop a call at the token it is at."""
        self.advance(now)
        left = max(0.0, execution.end_step - self.steps)
        self.sampled += execution.tokens_left - left
        execution.tokens_left = left
        execution.engine = None
        self._changed(-1, -execution.context)

    def stall(self, seconds: float) -> None:
        """Decode nothing for what takes so long on a machine of its own."""
        self.t += seconds * self.slowdown

    def slow(self, now: float, slowdown: float) -> None:
        """From now on everything takes so many times as long; what it is in the middle of, too."""
        self.advance(now)
        self.t = now + (self.t - now) * slowdown / self.slowdown
        self.slowdown = slowdown
        self._changed(0, 0.0)

    def advance(self, now: float) -> None:
        """Count the steps done until now."""
        if now > self.t:
            if self.calls:  # an empty batch may take no time at all, and goes nowhere
                self.steps += (now - self.t) / self.step_s
            self.t = now

    def next_end(self) -> float | None:
        """When the first call ends if nothing changes; None without calls."""
        heap = self._heap
        while heap and (heap[0][2].engine is not self or heap[0][2].end_step != heap[0][0]):
            heapq.heappop(heap)
        return self.t + max(0.0, heap[0][0] - self.steps) * self.step_s if heap else None

    def pop_ended(self, now: float) -> Execution | None:
        """The first call, if it has ended by now; it is removed."""
        self.advance(now)
        if self.next_end() is None or self._heap[0][0] > self.steps + 1e-6:  # of a token: float error, not work
            return None
        execution = heapq.heappop(self._heap)[2]
        self.remove(now, execution)
        return execution

    def running(self) -> list[Execution]:
        """Executions with a call here, the next to end first."""
        return [e for step, _, e in sorted(self._heap) if e.engine is self and e.end_step == step]

    def _changed(self, calls: int, context: float) -> None:
        self.calls += calls
        self.context += context
        self.changes += 1
        self.step_s = self.cost.decode_step_s(self.calls, self.context) * self.slowdown
