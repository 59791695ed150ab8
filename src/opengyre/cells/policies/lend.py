"""Idle trainers help rollout, as a whole pool and one way only: rollout cells never help training.

    pool trains ── nothing to train, executions to serve, the wait is longer than a switch pair ─▶ pool rolls out
    pool rolls out ── enough of the step's groups are there ─▶ pool trains

This is what verl's hybrid replicas do, kept as the third baseline beside colocate and async. *Enough* is a share of the
step that grows when trainers were called back too early: one notch per so many idle steps, a function of a counter in
the snapshot, so it can be replayed from the log and cannot be applied twice (field case C03).
"""

from __future__ import annotations

import math

from opengyre.cells.policies.base import Action, Decision, Snapshot, hold, keep_one_serving, settled, switch_pair_s
from opengyre.config import RunConfig

RELEASE_SHARE = 0.5  # of the step's groups: training them takes about as long as the rest needs to come in
RELEASE_NOTCH = (
    0.1  # a tenth of a step: coarse enough to settle in a few steps, too fine to overshoot by one group of 10
)
IDLE_STEPS_PER_NOTCH = 2  # one idle step may be an accident


def release_share(
    idle_steps: int,
    *,
    start: float = RELEASE_SHARE,
    notch: float = RELEASE_NOTCH,
    idle_steps_per_notch: int = IDLE_STEPS_PER_NOTCH,
    most: float = 1.0,
) -> float:
    """Share of a step's groups at which the pool goes back, after ``idle_steps`` steps in which trainers were idle."""
    return min(most, start + notch * (idle_steps // idle_steps_per_notch))


class LendPolicy:
    """The pool is the core and the first ``schedule.train_cells`` satellites."""

    name = "lend"
    moves_core = True
    wants_outlook = True

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Move the whole pool, or nothing."""
        level = snapshot.waterlevel
        if level is None:
            return hold("the waterlevel is not known, which is not the same as low")
        share = release_share(snapshot.trainer_idle_steps)
        enough = math.ceil(share * self._config.samples.queries_per_step)
        if self._training_due(snapshot, enough):
            return self._move(snapshot, "train", f"{enough} groups are there ({share:.0%} of the step)")
        busy = snapshot.claimable_micro_steps or snapshot.claimed_micro_steps
        if busy or level <= len(snapshot.heading("rollout")):
            return hold("the pool has work" if busy else "no execution that more cells could help")
        if snapshot.step_eta_s is not None and snapshot.step_eta_s < switch_pair_s(snapshot, self._config):
            return hold(f"the step is full in {snapshot.step_eta_s:.1f} s, sooner than a switch pays")
        return self._move(snapshot, "rollout", f"trainers are idle, {level} executions are not over")

    def _training_due(self, s: Snapshot, enough: int) -> bool:
        if not s.step_open:
            return False
        return s.step_full or (s.step_groups is not None and s.step_groups >= enough)

    def _move(self, s: Snapshot, role: str, reason: str) -> Decision:
        satellites = [c for c in s.cells if not c.core][: self._config.schedule.train_cells]
        pool = [c for c in s.cells if c.core] + satellites
        cells = [c for c in settled(s, pool, self._config.schedule.cooldown_s) if c.heading != role]
        actions = [Action(c.name, "train" if role == "train" else "rollout") for c in cells]
        return Decision(keep_one_serving(s, actions), reason)
