"""One simulated run: real policies and real step assembly over executions and cells that only pass time.

    admit (within max_staleness) ─▶ queue ─▶ turns on rollout cells ◀──▶ tools ─▶ evaluator ─▶ group complete
       ▲                                                                                            │
       │              open step ◀── micro-steps ────────────────────────────────────────────────────┘
       │                 │ claims ▲ sums        training cells, coming and going
       └── commit ◀── complete, core there      policy.decide(snapshot) after whatever changed

Events sit in a heap of (time, number, function, arguments); whoever changed something pulses, and the policy is asked
once for all that happened at a moment, as live. Nothing waits: every execution ends (its turns are finite), every
micro-step is claimed (the core trains, or the policy brings it back), and a run that stops moving is an error.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from opengyre.cells.policies import make_policy
from opengyre.cells.policies.base import Policy
from opengyre.cells.state import CellState
from opengyre.errors import OpenGyreError
from opengyre.samples.assemble import Assembler
from opengyre.simulate.cells import Pool
from opengyre.simulate.outcome import Outcome, Tally
from opengyre.simulate.recorder import Recorder
from opengyre.simulate.script import Execution, Query
from opengyre.simulate.serving import Engine
from opengyre.simulate.view import View
from opengyre.simulate.workload import Source, Workload

Action = Callable[..., None]


class SimulationError(OpenGyreError):
    """A simulated run that cannot go on: no event is left, or it takes absurdly long."""


class Simulator:
    """One run. ``run()`` once.

    Args:
        workload: cluster, steps, costs.
        source: the executions' scripts by query number.
        policy: a name, or a policy object.
        recorder: hears the events of a live run's log; None: nobody does.
        seed: of cell failures.
    """

    def __init__(
        self,
        workload: Workload,
        source: Source,
        policy: str | Policy,
        *,
        recorder: Recorder | None = None,
        seed: int = 0,
    ) -> None:
        self.workload, self.source = workload, source
        self.config = workload.run_config(policy if isinstance(policy, str) else policy.name)
        self.policy = make_policy(self.config) if isinstance(policy, str) else policy
        self.cost = workload.cost
        self.now = 0.0
        self.recorder = recorder
        self.seed = seed
        run = workload.run
        self.assembler = Assembler(run.queries_per_step, run.max_staleness, steps=run.steps)
        self.queue: deque[Execution] = deque()
        self.running: set[Execution] = set()
        self.line: deque[Execution] = deque()  # calls that wait for a serving cell
        self.queries: dict[str, Query] = {}
        self.unfinished = 0  # admitted queries whose executions are not all over
        self.tally = Tally()
        self.pool = Pool(self)
        self.view = View(self)
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0
        self._pulse_at: float | None = None
        self._decided = -1e9

    # --- the loop

    def run(self) -> Outcome:
        """Go through the run. Raises SimulationError if it stops moving."""
        if self.recorder:
            self.recorder.began(self)
        self.pool.start()
        self.pulse()
        limit, host = self.workload.run.give_up_hours * 3600, self.workload.host
        while self.assembler.version < self.workload.run.steps:
            if not self._heap or self.now > limit:
                where = f"{self.policy.name} at step {self.assembler.version + 1}, {self.now / 3600:.1f} h"
                raise SimulationError("the run does not go on", where=where, right="a policy that brings the core back")
            self.now, _, action, args = heapq.heappop(self._heap)
            action(*args)
            self.tally.events += 1
            if host.cores:
                self.pool.share(host)
        self.pool.finish()
        if self.recorder:
            self.recorder.ended(self)
        return self.tally.outcome(self)

    def at(self, seconds: float, action: Action, *args: Any) -> None:
        """Have ``action`` called so many seconds from now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + seconds, self._number, action, args))

    def pulse(self) -> None:
        """Something changed: ask the policy, once for everything of this moment."""
        due = max(self.now, self._decided + self.workload.run.tick_s)
        if self._pulse_at is None or due < self._pulse_at:
            self._pulse_at = due
            self.at(due - self.now, self._decide, due)

    def _decide(self, due: float) -> None:
        if self._pulse_at != due:
            return
        self._pulse_at, self._decided = None, self.now
        snapshot = self.view.snapshot()
        decision = self.policy.decide(snapshot)
        self.tally.decisions += 1
        admitted = self._admit(decision.admit)
        started = [action for action in decision.actions if self.pool.begin(action, decision.reason)]
        if self.recorder and (started or (admitted and decision.admit is not None)):
            self.recorder.decided(self, decision, started, admitted, snapshot)
        if admitted or started:
            self.pulse()

    # --- executions

    def _admit(self, most: int | None) -> int:
        admissible = self.assembler.admissible()
        number = admissible if most is None else min(most, admissible)
        for _ in range(number):
            place = self.assembler.admitted
            query_id = f"q{place:06d}"
            self.assembler.admit(query_id)
            scripts = self.source.query(place)
            query = Query(query_id, self.now, self.assembler.version, len(scripts))
            self.queries[query_id] = query
            self.unfinished += 1
            for member, script in enumerate(scripts):
                self.queue.append(Execution(f"{query_id}-{member:02d}-0", query, script))
                self.view.queued(self.queue[-1])
            if self.recorder:
                self.recorder.query(self, query, "admitted")
        if number:
            self.start_executions()
        return number

    def start_executions(self) -> None:
        """Let as many run as the serving cells have slots for."""
        limit = self.config.cells.slots * self.pool.serving
        while self.queue and len(self.running) < limit:
            execution = self.queue.popleft()
            execution.started = self.now
            self.running.add(execution)
            self.view.started(execution)
            self.at(execution.script.boot_s, self._call, execution)
            if self.workload.executions.timeout_s is not None:
                self.at(execution.script.boot_s + self.workload.executions.timeout_s, self._deadline, execution)
            if self.recorder:
                self.recorder.execution(self, execution, "running")
        self.tally.level(self)
        if self.recorder:
            self.recorder.waterlevel(self)

    def _call(self, execution: Execution) -> None:
        if execution.over:
            return
        turn = execution.script.turns[execution.turn]
        execution.tokens_left, execution.context = turn.tokens, turn.context
        self.place(execution, turn.prompt_tokens)

    def place(self, execution: Execution, prompt_tokens: float = 0.0, kv_from: Engine | None = None) -> None:
        """Give a call to a serving cell, or have it wait in line. ``kv_from``: its KV comes along if versions agree."""
        seat = self.pool.seat(execution)
        if seat is None:
            if execution.held_since < 0:
                execution.held_since = self.now
            self.line.append(execution)
            return
        if execution.held_since >= 0:
            execution.held_s += self.now - execution.held_since
            execution.held_since = -1.0
        known = execution.cached == (seat, seat.epoch) or kv_from is not None
        lost = 0.0 if known else max(0.0, execution.context - prompt_tokens) if execution.cached else 0.0
        execution.cached = (seat, seat.epoch)
        self.tally.reprefilled += lost
        if kv_from is not None:
            seat.stall(self.cost.kv_move_s(execution.context))
        seat.add(self.now, execution, prompt_tokens + lost)
        self.tally.fresh_prefill += prompt_tokens
        self.expect(seat)

    def serve_line(self) -> None:
        """Calls that wait get what places there are."""
        for _ in range(len(self.line)):
            execution = self.line.popleft()
            if not execution.over:
                self.place(execution)
                if self.line and self.line[-1] is execution:  # no place: nor is there one for the rest
                    self.line.rotate(1)
                    return

    def expect(self, engine: Engine) -> None:
        """Be there when the engine's first call ends."""
        end = engine.next_end()
        if end is not None:
            self.at(max(0.0, end - self.now), self._served, engine, engine.changes)

    def _served(self, engine: Engine, changes: int) -> None:
        if engine.changes != changes:
            return
        while (execution := engine.pop_ended(self.now)) is not None:
            turn = execution.script.turns[execution.turn]
            execution.turn += 1
            over = execution.turn == len(execution.script.turns)
            call_s = self.workload.host.call_s * self.pool.slowdown
            self.at(call_s + turn.tool_s, self._score if over else self._call, execution)
        if self.line:
            self.serve_line()
        self.expect(engine)

    def _deadline(self, execution: Execution) -> None:
        if execution.over:
            return
        pauses = self.workload.executions.timeout_pauses
        limit = (self.workload.executions.timeout_s or 0.0) + execution.script.boot_s
        left = limit - execution.active_s(self.now, pauses=pauses)
        if left > 1e-3:  # it was held meanwhile; a millisecond is float error
            self.at(left, self._deadline, execution)
            return
        execution.timed_out = True
        if execution.engine is not None:
            engine = execution.engine
            engine.remove(self.now, execution)
            self.expect(engine)
            self.serve_line()
        self._score(execution)

    def _score(self, execution: Execution) -> None:
        if execution.over:
            return
        execution.over = True
        query, pauses = execution.query, self.workload.executions.timeout_pauses
        active_s = execution.active_s(self.now, pauses=pauses)
        self.tally.executions += 1
        self.tally.timeouts += execution.timed_out
        if active_s >= query.longest_s:
            query.longest_s, query.timed_out = active_s, execution.timed_out
        turns = len(execution.script.turns)
        done = execution.turn / turns if execution.timed_out and turns else 1.0
        query.train_tokens += execution.script.train_tokens * done
        self.at(execution.script.score_s, self._done, execution)

    def _done(self, execution: Execution) -> None:
        self.running.discard(execution)
        self.view.ended(execution)
        if self.recorder:
            self.recorder.execution(self, execution, "done")
        query = execution.query
        query.left -= 1
        if query.left == 0:
            self.unfinished -= 1
            self.tally.group(query)
            self.assembler.complete(query.query_id)
            if self.recorder:
                self.recorder.query(self, query, "complete")
            self.pool.join()
        self.start_executions()
        self.pulse()

    # --- the step

    def committed(self) -> None:
        """The open step was applied and published."""
        self.assembler.commit()
        self.tally.step(self)
        self.pool.pull()
        self.pool.join()
        self.pulse()

    def state_of(self, name: str) -> CellState:
        """A cell's state."""
        return self.pool.cells[name].state
