"""The event log of a simulated run, in the form of a live run's, so that the same report shows both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from opengyre.cells.policies.base import Action, Decision, Snapshot
from opengyre.executions.outcome import Outcome
from opengyre.simulate.script import Execution, Query

if TYPE_CHECKING:
    from opengyre.simulate.cells import Cell
    from opengyre.simulate.simulator import Simulator


class Recorder:
    """Keeps the events in memory; ``write`` makes them a run folder."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._micros = 0
        self._micro: dict[str, dict[str, Any]] = {}  # what each cell is at
        self._level: tuple[int, int, int] | None = None
        self._executions = 0

    def write(self, run_dir: Path) -> Path:
        """Write ``events.jsonl`` and the report of a run folder; returns the report's path."""
        from opengyre.watch.report import write_report

        run_dir.mkdir(parents=True, exist_ok=True)
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in self.events)
        (run_dir / "events.jsonl").write_bytes(lines)
        return write_report(run_dir)

    def _emit(self, sim: Simulator, kind: str, **fields: Any) -> None:
        self.events.append({"t": round(sim.now, 3), "kind": kind, **fields})

    def began(self, sim: Simulator) -> None:
        """The run starts."""
        cells = [{"cell": cell.name, "core": cell.core} for cell in sim.pool.cells.values()]
        name = f"{sim.workload.name}, simulated"
        steps, policy = sim.workload.run.steps, sim.policy.name
        self._emit(sim, "run", state="start", name=name, policy=policy, steps=steps, cells=cells, seed=sim.source.seed)

    def ended(self, sim: Simulator) -> None:
        """The run is over."""
        self._emit(sim, "run", state="end", reason="done (simulated: no model was trained)")

    def cell(self, sim: Simulator, cell: Cell, reason: str) -> None:
        """A cell entered a state."""
        self._emit(sim, "cell", cell=cell.name, state=cell.state.value, reason=reason)

    def switched(self, sim: Simulator, cell: Cell, seconds: float) -> None:
        """A role switch is done."""
        to_train = cell.state.heading == "train"
        direction = "rollout>train" if to_train else "train>rollout"
        phases = {"drain_s" if to_train else "pull_s": round(seconds, 3)}
        self._emit(sim, "switch", cell=cell.name, direction=direction, phases=phases, total_s=seconds, ok=True)

    def waterlevel(self, sim: Simulator) -> None:
        """Executions queued or running changed, or the cells that serve."""
        level = (len(sim.queue), len(sim.running), sim.pool.serving)
        if level != self._level:
            self._level = level
            queued, running, cells = level
            slots = sim.config.cells.slots
            self._emit(sim, "waterlevel", queued=queued, running=running, rollout_cells=cells, slots=slots)

    def query(self, sim: Simulator, query: Query, state: str) -> None:
        """A query was admitted or is complete."""
        self._emit(sim, "query", query=query.query_id, task="", state=state, version=query.version)

    def execution(self, sim: Simulator, execution: Execution, state: str) -> None:
        """An execution started or is over. It has no reward: nothing was scored."""
        about: dict[str, Any] = {"execution": execution.name, "query": execution.query.query_id, "task": "simulated"}
        if state == "done":
            self._executions += 1
            outcome = Outcome.TIMED_OUT if execution.timed_out else Outcome.FINISHED
            turns = execution.script.turns[: execution.turn]
            about |= {"outcome": outcome.value, "calls": execution.turn, "held_s": round(execution.held_s, 3)}
            about["sampled_tokens"] = int(sum(turn.tokens for turn in turns))
        self._emit(sim, "execution", **about, split="train", state=state)

    def claimed(self, sim: Simulator, cell: Cell) -> None:
        """A micro-step was claimed."""
        self._micros += 1
        self._micro[cell.name] = {
            "step": sim.assembler.version + 1,
            "micro": self._micros,
            "cell": cell.name,
            "tokens": int(cell.doing),
        }
        self._emit(sim, "micro_step", **self._micro[cell.name], state="claimed")

    def computed(self, sim: Simulator, cell: Cell) -> None:
        """It is done."""
        self._emit(sim, "micro_step", **self._micro[cell.name], state="done", seconds=round(sim.now - cell.began, 3))

    def step(self, sim: Simulator) -> None:
        """A step was committed."""
        version, q = sim.assembler.version, sim.workload.run.queries_per_step
        step_s = sim.tally.last_step_s
        executions, self._executions = self._executions, 0
        self._micros = 0
        self._emit(
            sim,
            "step",
            step=version,
            version=version,
            groups=q,
            executions=executions,
            staleness_max=sim.tally.staleness_max,
            step_s=step_s,
        )

    def decided(
        self, sim: Simulator, decision: Decision, started: list[Action], admitted: int, snapshot: Snapshot
    ) -> None:
        """A decision that did something."""
        actions = [msgspec.to_builtins(action) for action in started]
        fields = {"policy": sim.policy.name, "actions": actions, "reason": decision.reason, "admit": decision.admit}
        self._emit(sim, "decision", **fields, snapshot=msgspec.to_builtins(snapshot))
