"""What a simulated run comes to: counted while it goes, summed up at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from opengyre.simulate.script import Query

if TYPE_CHECKING:
    from opengyre.simulate.simulator import Simulator

LONG_H = 4.0  # the published share is of queries of at least 4 h (SPEC section 2)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run under one policy. Hours are of the run's clock, shares 0 to 1.

    ``efficiency``: cell time spent on slots that serve, or on training, by all cell time. ``work_hours``: what the work
    done would take at full batches on all cells. ``long_share``: queries whose longest execution took 4 h or more;
    ``long_timeouts``: share of those in which that one hit the time-out.
    """

    policy: str
    hours: float
    steps: int
    executions: int
    timeouts: int
    efficiency: float
    work_hours: float
    switches: int
    staleness_mean: float
    staleness_max: int
    long_share: float
    long_timeouts: float
    query_hours_median: float
    reprefill_hours: float
    failures: int
    shares: dict[str, float]
    step_hours: list[float]
    events: int
    decisions: int


class Tally:
    """Counters of one run."""

    def __init__(self) -> None:
        self.events = self.decisions = self.executions = self.timeouts = self.moved = self.failures = 0
        self.reprefilled = self.fresh_prefill = self.train_s = 0.0
        self.slot_s = 0.0  # executions that run, at most the slots there are, by seconds
        self._staleness: list[int] = []
        self._groups: list[tuple[float, bool]] = []
        self._commits: list[float] = []
        self._trained_tokens = 0.0
        self._level_at = 0.0
        self._slots_taken = 0
        self.last_step_s = 0.0

    def level(self, sim: Simulator) -> None:
        """Call before and after the number of serving cells changes, and after that of running executions does."""
        if sim.now > self._level_at:
            self.slot_s += (sim.now - self._level_at) * self._slots_taken
            self._level_at = sim.now
        self._slots_taken = min(len(sim.running), sim.config.cells.slots * sim.pool.serving)

    def group(self, query: Query) -> None:
        """A group is complete."""
        self._groups.append((query.longest_s, query.timed_out))

    def trained(self, sim: Simulator, query: Query) -> None:
        """A group joined the open step."""
        self._staleness.append(sim.assembler.version - query.version)
        self._trained_tokens += query.train_tokens

    def step(self, sim: Simulator) -> None:
        """A step was committed."""
        self.last_step_s = sim.now - (self._commits[-1] if self._commits else 0.0)
        self._commits.append(sim.now)
        if sim.recorder:
            sim.recorder.step(sim)

    @property
    def staleness_max(self) -> int:
        """Of all groups trained so far."""
        return max(self._staleness, default=0)

    def outcome(self, sim: Simulator) -> Outcome:
        """Sum up."""
        cells = list(sim.pool.cells.values())
        cell_s = sim.now * len(cells)
        seconds: dict[str, float] = {}
        for cell in cells:
            for state, spent in cell.seconds.items():
                seconds[state] = seconds.get(state, 0.0) + spent
        long = [timed_out for longest, timed_out in self._groups if longest >= LONG_H * 3600]
        durations = sorted(longest for longest, _ in self._groups)
        starts = [0.0, *self._commits[:-1]]
        busy = self.slot_s / sim.config.cells.slots + self.train_s
        return Outcome(
            policy=sim.policy.name,
            hours=sim.now / 3600,
            steps=len(self._commits),
            executions=self.executions,
            timeouts=self.timeouts,
            efficiency=busy / cell_s,
            work_hours=self._work_s(sim) / len(cells) / 3600,
            switches=sim.pool.switches,
            staleness_mean=sum(self._staleness) / max(1, len(self._staleness)),
            staleness_max=self.staleness_max,
            long_share=len(long) / max(1, len(self._groups)),
            long_timeouts=sum(long) / max(1, len(long)),
            query_hours_median=durations[len(durations) // 2] / 3600 if durations else 0.0,
            reprefill_hours=sim.cost.prefill_s(self.reprefilled) / 3600,
            failures=self.failures,
            shares={state: spent / cell_s for state, spent in sorted(seconds.items())},
            step_hours=[(t - s) / 3600 for s, t in zip(starts, self._commits, strict=True)],
            events=self.events,
            decisions=self.decisions,
        )

    def _work_s(self, sim: Simulator) -> float:
        """Cell seconds that this work needs at least: decoding in full batches, no prefix computed twice, no switch."""
        run, cost = sim.workload.run, sim.cost
        sampled = sum(c.engine.sampled for c in sim.pool.cells.values())
        context = sim.source.mean_context
        slots = sim.config.cells.slots
        token_s = cost.decode_step_s(slots, slots * context) / slots
        size = sim.workload.micro_step_tokens
        train_s = self._trained_tokens * cost.train_s(size) / size
        return sampled * token_s + cost.prefill_s(self.fresh_prefill) + train_s + run.steps * cost.commit_s
