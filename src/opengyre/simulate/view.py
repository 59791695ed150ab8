"""What a policy sees of a simulated run: the same snapshot, made from the same kinds of measurements, as live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opengyre.cells.policies.base import CellView, Snapshot, SoFar, wants_outlook
from opengyre.cells.policies.survival import Outlook, Survival
from opengyre.simulate.script import Execution

if TYPE_CHECKING:
    from opengyre.simulate.simulator import Simulator


class View:
    """Makes the snapshots of one simulator."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.so_far = SoFar()
        self.survival = Survival() if wants_outlook(sim.policy) else None

    def snapshot(self) -> Snapshot:
        """The run at this moment."""
        sim, pool, step = self.sim, self.sim.pool, self.sim.pool.step
        micro_s = sim.cost.train_s(sim.workload.micro_step_tokens)
        version = sim.assembler.version
        missing = sim.assembler.missing
        outlook = self.survival.outlook(sim.now, missing) if self.survival else Outlook()
        return self.so_far.note(
            Snapshot(
                now=sim.now,
                cells=[
                    CellView(c.name, c.core, c.state, version, c.engine.calls, c.since, int(c.engine.context))
                    for c in pool.cells.values()
                ],
                slots=sim.config.cells.slots,
                queued=len(sim.queue),
                running=len(sim.running),
                unfinished_groups=sim.unfinished,
                admissible_queries=sim.assembler.admissible(),
                claimable_micro_steps=len(step.claimable),
                claimed_micro_steps=step.out,
                step_open=not pool.committing,
                step_full=sim.assembler.step_full,
                step_groups=sim.workload.run.queries_per_step - missing,
                ready_groups=sim.assembler.waiting,
                micro_step_s=micro_s,
                step_eta_s=outlook.step_eta_s,
                next_group_s=outlook.next_group_s,
                version=version,
                commit_s=sim.cost.commit_s + sim.cost.publish_s if version else None,
                switch_cost_s=sim.cost.switch_pair_s / 2 if pool.switches else None,
                switches=pool.switches,
            )
        )

    def queued(self, execution: Execution) -> None:
        """An execution waits to start."""
        if self.survival:
            self.survival.queued(execution.name, execution.query.query_id)

    def started(self, execution: Execution) -> None:
        """An execution starts."""
        if self.survival:
            self.survival.started(execution.name, execution.query.query_id, self.sim.now)

    def ended(self, execution: Execution) -> None:
        """An execution is over."""
        if self.survival:
            self.survival.ended(execution.name, execution.query.query_id, self.sim.now)
