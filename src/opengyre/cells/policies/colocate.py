"""The classic barrier: every cell rolls out, then every cell trains.

    no carry-over   rollout ── no execution left, and micro-steps wait ─▶ train ── step over ─▶ rollout
    carry-over      rollout ── the step is full ─▶ train, unfinished executions wait ── step over ─▶ rollout

Without carry-over (default) a step's queries are admitted when it opens, none before, so that no cell waits for queries
of a later step. With it the barrier costs only the stop: what still runs goes on on the next version, within the
staleness bound, and executions see a call that takes long.
"""

from __future__ import annotations

from opengyre.cells.policies.base import Action, Decision, Snapshot
from opengyre.cells.state import Role
from opengyre.config import RunConfig


class ColocatePolicy:
    """All cells in one role, the core too. No cool-down: the barrier turns at most twice a step."""

    name = "colocate"
    moves_core = True

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Send every cell that is in the wrong role to the right one."""
        level = snapshot.waterlevel
        if level is None:
            return Decision([], "the waterlevel is not known, which is not the same as zero", admit=0)
        carry = self._config.schedule.carry_over
        admit = None if carry else self._missing(snapshot)
        waiting = admit is None or min(admit, snapshot.admissible_queries) > 0
        role: Role
        if carry and snapshot.step_full:
            role, reason = "train", f"the step is full, {level} executions wait"
        elif level or snapshot.unfinished_groups or (snapshot.admissible_queries and waiting):
            role, reason = "rollout", f"{level} executions and {snapshot.unfinished_groups} groups to finish"
        elif snapshot.claimable_micro_steps or snapshot.step_full:
            role, reason = "train", f"all executions are over, {snapshot.claimable_micro_steps} micro-steps wait"
        else:
            return Decision([], "nothing to roll out and nothing to claim", admit)
        actions = [Action(c.name, role) for c in snapshot.cells if c.state.stable and c.heading != role]
        return Decision(actions, reason, admit)

    def _missing(self, s: Snapshot) -> int:
        """Queries that the open step needs and nobody has started."""
        there = (s.step_groups or 0) + s.ready_groups + s.unfinished_groups
        return max(0, self._config.samples.queries_per_step - there)
