"""The classic barrier: every cell rolls out until no execution is left, then every cell trains.

    rollout ── nothing queued, running, unfinished or admissible, and micro-steps wait ─▶ train ── step over ─▶ rollout

Simple and never stale, at a price: all cells wait for the slowest execution.
"""

from __future__ import annotations

from opengyre.cells.policies.base import Action, Decision, Snapshot, hold
from opengyre.cells.state import Role
from opengyre.config import RunConfig


class ColocatePolicy:
    """All cells in one role, the core too. No cool-down: the barrier turns at most twice a step."""

    name = "colocate"
    moves_core = True

    def __init__(self, config: RunConfig) -> None:
        del config  # the barrier has nothing to set

    def decide(self, snapshot: Snapshot) -> Decision:
        """Send every cell that is in the wrong role to the right one."""
        level = snapshot.waterlevel
        if level is None:
            return hold("the waterlevel is not known, which is not the same as zero")
        role: Role
        if level or snapshot.unfinished_groups or snapshot.admissible_queries:
            role = "rollout"
            reason = f"{level} executions and {snapshot.unfinished_groups} groups to finish"
        elif snapshot.claimable_micro_steps:
            role, reason = "train", f"all executions are over, {snapshot.claimable_micro_steps} micro-steps wait"
        else:
            return hold("nothing to roll out and nothing to claim")
        actions = [Action(c.name, role) for c in snapshot.cells if c.state.stable and c.heading != role]
        return Decision(actions, reason)
