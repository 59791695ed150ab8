"""A policy that changes roles as often as it can: whatever must survive a switch meets many of them."""

from __future__ import annotations

from opengyre.cells.policies.base import Action, Decision, Snapshot, hold, keep_one_serving
from opengyre.cells.state import CellState
from opengyre.config import RunConfig


class Churn:
    """Every settled satellite goes to its other role, as long as one cell serves."""

    name = "churn"
    moves_core = False

    def __init__(self, config: RunConfig) -> None:
        self._rest_s = config.schedule.cooldown_s

    def decide(self, snapshot: Snapshot) -> Decision:
        """Flip all that may."""
        actions = [
            Action(c.name, "train" if c.state is CellState.ROLLOUT else "rollout")
            for c in snapshot.cells
            if not c.core and c.state.stable and snapshot.now - c.since >= self._rest_s
        ]
        actions = keep_one_serving(snapshot, actions)
        return Decision(actions, "churn") if actions else hold("resting")
