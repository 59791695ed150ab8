"""A fixed split: some cells always train, the others always roll out; nobody waits and nobody helps."""

from __future__ import annotations

from opengyre.cells.policies.base import Action, Decision, Snapshot, keep_one_serving, settled
from opengyre.config import RunConfig


class AsyncPolicy:
    """The core and the first ``schedule.train_cells`` satellites train. Acts at the start and after a restart only."""

    name = "async"
    moves_core = False

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Send each satellite to its fixed role."""
        schedule = self._config.schedule
        satellites = [c for c in snapshot.cells if not c.core]
        trainers = {c.name for c in satellites[: schedule.train_cells]}
        actions = [
            Action(c.name, "train" if c.name in trainers else "rollout")
            for c in settled(snapshot, satellites, schedule.cooldown_s)
            if (c.heading == "train") != (c.name in trainers)
        ]
        return Decision(keep_one_serving(snapshot, actions), f"{len(trainers)} of {len(satellites)} satellites train")
