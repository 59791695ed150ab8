"""Elastic, and more: nobody idles for long, the core serves too, and a cell moves where it costs least.

    nothing to train, and the next group is far  ─▶ idle trainers roll out, the core too, one cell per execution at most
    micro-steps that nobody is coming for        ─▶ the core first; then satellites whose slots nobody needs
    the step is full                             ─▶ the core trains: only there is it committed
    a slot is about to be free                   ─▶ a query is admitted, not earlier: its staleness counts from there

What differs from ``elastic``, by what it gains (benchmarks/scheduling.py; figures in docs/scheduling.md):

1. A trainer without a micro-step is no use to anybody. It rolls out, if the next group is further away than a switch
   there and back: an estimate from the ages of what runs (survival.py); without one, only executions that have no slot
   count. More cells than the slots need are no waste: smaller batches decode faster, and a tail is all latency. But
   that gains little and half of the groups come before the estimate, so for this a group must be three switches away.
   With groups ready it helps such a tail only if the commit (measured) takes longer than a switch there and back.
2. The core rolls out like any other cell, from the moment its step has nothing to claim until something is.
3. Of the cells that could go to training, the one goes that would move the fewest KV tokens.

With a staleness bound of 0 or 1 all of a step waits for its last groups, and then for their training: a trainer that
is there when they come is worth more than a fuller use of cells. There the waterlevel rule stands, and only the core's
idle time is used (else 2 of 160 random workloads took 5 and 8 % longer than under ``elastic``). So it does where
training is worth several cells all the time: one of them goes or comes whenever a group completes, and to send the idle
ones away gains nothing (else 10 of 240 took 1 to 4 % longer on average). There the core helps only a queue, no tail.

Every decision follows from the snapshot alone. Nothing here can break the staleness bound: what may be admitted is
decided elsewhere (samples/assemble.py), and ``admit`` can only take away from it.
"""

from __future__ import annotations

from opengyre.cells.policies.base import (
    Action,
    CellView,
    Decision,
    Snapshot,
    keep_one_serving,
    settled,
    switch_pair_s,
)
from opengyre.cells.policies.elastic import ElasticPolicy
from opengyre.cells.state import CellState
from opengyre.config import RunConfig

_DEEP = 2  # a staleness bound from which on steps overlap enough that nothing waits for one step's training alone
_MANY = 2.5  # cells for training from which on some of them train at any time; shipped workloads have 2 of 4
_SPREAD_PAIRS = 3  # switches there and back that the next group must be away, where nobody waits for a slot
Verdict = tuple[list[Action], str]


class ElasticPlusPolicy:
    """See the file. The core may leave training; it is back before a step is committed."""

    name = "elastic-plus"
    moves_core = True
    wants_outlook = True

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._waterlevel = ElasticPolicy(config)

    def decide(self, snapshot: Snapshot) -> Decision:
        """Fetch the core if the step needs it; else send idle trainers to rollout, or a cell to the work that waits."""
        level = snapshot.waterlevel
        if level is None:
            return Decision([], "the waterlevel is not known, which is not the same as low")
        admit = self._admit(snapshot, level)
        demand = level + snapshot.admissible_queries * self._config.samples.group_size
        many = snapshot.training_cells is not None and snapshot.training_cells >= _MANY
        if self._config.schedule.max_staleness < _DEEP or many:
            return self._shallow(snapshot, demand, tails=not many)
        for rule in (self._core_due, self._back, self._out):
            if (verdict := rule(snapshot, demand)) is not None:
                return Decision(*verdict, admit)
        return Decision([], "every cell is where it is of use", admit)

    def _shallow(self, s: Snapshot, demand: int, *, tails: bool) -> Decision:
        """The waterlevel rule, and the core helps while there is nothing to train: executions that have no slot, and
        with ``tails`` those that have."""
        if (verdict := self._core_due(s, demand)) is not None:
            return Decision(*verdict)
        decision = self._waterlevel.decide(s)
        busy = s.claimable_micro_steps or s.claimed_micro_steps or s.ready_groups or s.step_full or not s.step_open
        if decision.actions or busy or s.next_group_s is None:
            return decision
        rollouts, pair_s = len(s.heading("rollout")), switch_pair_s(s, self._config)
        queue = demand > rollouts * s.slots
        helps = s.next_group_s >= pair_s * (1 if queue else _SPREAD_PAIRS) and (queue or (tails and demand > rollouts))
        core = settled(s, [c for c in s.training() if c.core and helps], self._config.schedule.cooldown_s)
        reason = f"nothing to train (next group: {s.next_group_s:.1f} s), {demand} executions"
        return Decision([Action(c.name, "rollout") for c in core], reason) if core else decision

    def _admit(self, s: Snapshot, level: int) -> int:
        """Queries whose executions find a slot, on the cells that serve or will when nothing is left to train."""
        cells = len(s.heading("rollout")) if s.claimable_micro_steps else len(s.cells)
        free = cells * s.slots - level
        return max(0, -(-free // self._config.samples.group_size))

    def _core_due(self, s: Snapshot, demand: int) -> Verdict | None:
        """The core must be there when the step is full, and is the first to train."""
        core = next(c for c in s.cells if c.core)
        if core.state is not CellState.ROLLOUT or not (s.step_full or s.claimable_micro_steps):
            return None
        if not s.step_full and not settled(s, [core], self._config.schedule.cooldown_s):
            return None  # a full step does not wait for a cool-down
        if actions := keep_one_serving(s, [Action(core.name, "train")]):
            return actions, "the step is full" if s.step_full else "micro-steps wait"
        if not s.step_full or len(s.heading("rollout")) > 1:
            return None  # satellites train; or one is coming
        reliefs = sorted(s.training(), key=lambda c: (c.since, c.name))
        return [Action(c.name, "rollout") for c in reliefs[:1]], "the step is full, and the core serves alone"

    def _back(self, s: Snapshot, demand: int) -> Verdict | None:
        """Idle trainers roll out while they wait for the next group."""
        if s.claimable_micro_steps or not demand:
            return None
        rollouts, pair_s = len(s.heading("rollout")), switch_pair_s(s, self._config)
        unserved = -(-demand // s.slots) - rollouts
        if s.next_group_s is not None and s.next_group_s < pair_s and not s.step_full:
            return [], f"a group is expected in {s.next_group_s:.1f} s, sooner than a switch pays"
        calm = self._calm(s, pair_s)
        spread = demand - rollouts if calm else 0  # a cell per execution is the most that helps
        held = s.step_full or s.claimed_micro_steps or not s.step_open  # the core is needed at once
        idle = [c for c in s.training() if not (c.core and held)]
        cells = sorted(settled(s, idle, self._config.schedule.cooldown_s), key=lambda c: (c.core, c.since, c.name))
        moving = cells[: max(unserved, spread, 0)]
        if not moving:
            return None
        wait = "unknown" if s.next_group_s is None else f"{s.next_group_s:.1f} s"
        return [
            Action(c.name, "rollout") for c in moving
        ], f"nothing to train (next group: {wait}), {demand} executions"

    def _calm(self, s: Snapshot, pair_s: float) -> bool:
        """Whether nothing can be trained for so long that cells help where nobody waits for a slot. Groups that are
        ready are trained from the next commit on, and what that takes is measured, no guess."""
        if s.claimed_micro_steps or s.next_group_s is None:
            return False
        if s.ready_groups:
            return s.commit_s is not None and s.commit_s >= pair_s
        return s.step_full or s.next_group_s >= _SPREAD_PAIRS * pair_s

    def _out(self, s: Snapshot, demand: int) -> Verdict | None:
        """One cell whose slots nobody needs goes to micro-steps that nobody is coming for."""
        serving, trainers = s.serving(), s.heading("train")
        work = s.claimable_micro_steps - sum(c.state is not CellState.TRAINING for c in trainers)
        spare = (len(serving) - 1) * s.slots
        level = s.waterlevel or 0
        if work <= 0 or not serving or level > spare:
            return None
        share_s = None if s.micro_step_s is None else work * s.micro_step_s / (len(trainers) + 1)
        if share_s is not None and share_s < switch_pair_s(s, self._config):
            return [], f"a share of {share_s:.1f} s is not worth a switch"
        cells = settled(s, serving, self._config.schedule.cooldown_s)
        if not cells:
            return [], "cooling down"
        actions = keep_one_serving(s, [Action(min(cells, key=_cheapest).name, "train")])
        return actions, f"waterlevel {level} <= {len(serving) - 1} x {s.slots}, {work} micro-steps wait"


def _cheapest(cell: CellView) -> tuple[bool, float, float, float, str]:
    """The core first; then the least KV to move, then the fewest calls. What is not known counts as much."""
    kv = float("inf") if cell.kv_tokens is None else cell.kv_tokens
    running = float("inf") if cell.running is None else cell.running
    return (not cell.core, kv, running, cell.since, cell.name)
