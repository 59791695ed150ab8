"""The elastic rule: a rollout cell whose slots nobody needs trains; it comes back when somebody does (SPEC §4.3).

    to training   waterlevel <= (R - 1) * slots, R cells serving, and there are micro-steps nobody is coming for
    to rollout    executions need more slots than R cells have; or a burst begins and nothing is there to train

Queries that may be admitted count as executions: they will be in a moment. A switch takes seconds and a group's
micro-steps come all at once, so nobody is sent to training before there is something to claim. A full step that is
drained is not the end of a burst: the commit is near, and a cell sent back before it would pull weights twice.

With k = ceil(waterlevel / slots) cells needed, the first rule leaves k and the second asks for k, so the two never undo
each other at one waterlevel; cool-down and the switch cost damp what is left.
"""

from __future__ import annotations

from opengyre.cells.policies.base import (
    Action,
    CellView,
    Decision,
    Snapshot,
    hold,
    keep_one_serving,
    settled,
    switch_pair_s,
)
from opengyre.cells.state import CellState
from opengyre.config import RunConfig


class ElasticPolicy:
    """One satellite a decision to training, as many as needed back. The core always trains."""

    name = "elastic"
    moves_core = False

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Apply the rule; rollout first, since a queued execution waits and a micro-step can be claimed by others."""
        level = snapshot.waterlevel
        if level is None:
            return hold("the waterlevel is not known, which is not the same as low")
        demand = level + snapshot.admissible_queries * self._config.samples.group_size
        return self._back(snapshot, demand) or self._out(snapshot, demand)

    def _back(self, s: Snapshot, demand: int) -> Decision | None:
        rollouts = len(s.heading("rollout"))
        needed = -(-demand // s.slots) - rollouts
        reason = f"{demand} executions need {needed} more than {rollouts} x {s.slots} slots"
        if needed <= 0 and _between_bursts(s):
            needed = demand - rollouts  # a cell per execution is the most that can help
            reason = f"nothing to train before {demand} executions end"
        if needed <= 0:
            return None
        satellites = [c for c in s.training() if not c.core]
        cells = sorted(settled(s, satellites, self._config.schedule.cooldown_s), key=lambda c: (c.since, c.name))
        return Decision([Action(c.name, "rollout") for c in cells[:needed]], reason) if cells else None

    def _out(self, s: Snapshot, demand: int) -> Decision:
        serving = s.serving()
        if not serving:
            return hold("no cell to spare")
        spare = (len(serving) - 1) * s.slots
        if demand > spare:
            return hold(f"{demand} executions need more than {len(serving) - 1} x {s.slots} slots")
        arriving = sum(c.state is not CellState.TRAINING for c in s.heading("train"))
        work = s.claimable_micro_steps - arriving
        if work <= 0:
            return hold("no micro-step that no trainer is coming for")
        if not self._worth(s, work):
            return hold(f"{work} micro-steps are not worth a switch")
        cells = settled(s, [c for c in serving if not c.core], self._config.schedule.cooldown_s)
        if not cells:
            return hold("cooling down")
        cell = min(cells, key=_cheapest)
        actions = keep_one_serving(s, [Action(cell.name, "train")])
        return Decision(
            actions, f"waterlevel {s.waterlevel} <= {len(serving) - 1} x {s.slots}, {work} micro-steps wait"
        )

    def _worth(self, s: Snapshot, work: int) -> bool:
        """Whether the share of ``work`` that one more trainer would do lasts longer than the switch there and back."""
        if s.micro_step_s is None:
            return True  # a first switch is how it gets measured
        trainers = len(s.heading("train")) + 1
        return work * s.micro_step_s / trainers >= switch_pair_s(s, self._config)


def _between_bursts(s: Snapshot) -> bool:
    """True from a commit until the first group of the next step: nothing can be trained before an execution ends."""
    if s.claimable_micro_steps or s.claimed_micro_steps or s.ready_groups:
        return False
    return not s.step_open or s.step_groups == 0


def _cheapest(cell: CellView) -> tuple[float, float, str]:
    """Fewest calls to move first; an unknown number counts as many."""
    return (float("inf") if cell.running is None else cell.running, cell.since, cell.name)
