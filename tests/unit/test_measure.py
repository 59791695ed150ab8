"""Costs measured from what took how long: they are those that made it so, on hardware of their own or shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opengyre.cells.state import CellState
from opengyre.config import RunConfig, to_toml
from opengyre.errors import RecordError
from opengyre.simulate.cost import CostModel
from opengyre.simulate.measure import Costs, Load, RecordedCall, RecordedMicroStep, costs
from opengyre.simulate.recorder import Recorder
from opengyre.simulate.script import Execution, Query, Script, Turn
from opengyre.simulate.serving import Engine
from opengyre.simulate.simulator import Simulator
from opengyre.simulate.trace import Trace
from opengyre.simulate.workload import Host, Workload, build

COST = CostModel(
    decode_base_s=0.02,
    decode_call_s=0.001,
    prefill_tokens_per_s=20_000,
    train_tokens_per_s=2_000,
    micro_step_s=0.4,
)


class Kept:
    """Scripts that do not change with the costs: unequal turns, so that only the costs explain their seconds."""

    mean_context, seed = 500.0, 0

    def query(self, number: int) -> list[Script]:
        return [self._script(8 * number + member) for member in range(8)]

    def _script(self, place: int) -> Script:
        turns = tuple(
            Turn(
                20 + (7 * place + 13 * n) % 60, 50 + (11 * place + 17 * n) % 900, 500, 0.5 + (5 * place + 3 * n) % 8 / 4
            )
            for n in range(4 + place % 5)
        )
        return Script(0.2, turns, 0.5, 900.0 + 100 * (place % 7))


class Watched(Simulator):
    """Notes its calls as a proxy would."""

    def __init__(self, workload: Workload, policy: str) -> None:
        self.calls: list[RecordedCall] = []
        self.executions: list[tuple[float, float]] = []
        self.pulls: list[tuple[str, float, float]] = []
        self._open: dict[Execution, tuple[float, float]] = {}
        super().__init__(workload, Kept(), policy, recorder=Recorder())

    def place(self, execution: Execution, prompt_tokens: float = 0.0, kv_from: Engine | None = None) -> None:
        lost = self.tally.reprefilled
        super().place(execution, prompt_tokens, kv_from)
        self._open[execution] = (self.now, prompt_tokens + self.tally.reprefilled - lost)

    def at(self, seconds: float, action: Any, *args: Any) -> None:
        if action in (self._call, self._score) and args[0] in self._open:
            started, prompt = self._open.pop(args[0])
            execution = args[0]
            tokens = execution.script.turns[execution.turn - 1].tokens
            cell = self.pool.engines[id(execution.cached[0])].name
            self.calls.append(RecordedCall(started, self.now, tokens, prompt, cell))
        super().at(seconds, action, *args)

    def committed(self) -> None:
        serving = [c.name for c in self.pool.cells.values() if c.state is CellState.ROLLOUT]
        self.pulls += [(name, self.now, self.now + self.cost.pull_s) for name in serving]
        super().committed()

    def _done(self, execution: Execution) -> None:
        self.executions.append((execution.started, self.now))
        super()._done(execution)


def measured(host: Host, pull_s: float) -> Costs:
    """Costs as found in a run on that host."""
    workload = build(
        {
            "name": "measured",
            "about": "",
            "cluster": {"cells": 3, "slots": 16},
            "run": {"steps": 8, "queries_per_step": 4, "group_size": 8, "max_staleness": 1, "tick_s": 0.0},
            "training": {"micro_step_tokens": 800.0},
        }
    )
    workload = workload.change(cost=msgspec.structs.replace(COST, pull_s=pull_s), host=host)
    sim = Watched(workload, "async")
    sim.run()
    micro_steps = [
        RecordedMicroStep(e["t"] - e["seconds"], e["t"], e["tokens"], e["cell"])
        for e in sim.recorder.events
        if e["kind"] == "micro_step" and e["state"] == "done"
    ]
    return costs(sim.calls, micro_steps, Load(sim.calls, micro_steps, sim.executions, [(0.0, True)], sim.pulls))


@pytest.mark.parametrize(
    ("host", "pull_s"),
    [(Host(), 0.0), (Host(), 2.0), (Host(cores=2.0), 0.0), (Host(cores=2.0, harness_cores=0.3), 0.0)],
)
def test_the_costs_that_made_a_run_are_found_in_it(host: Host, pull_s: float) -> None:
    """Also what slows it down; no host is seen where there is none, and pulls are not taken for slow decoding."""
    found = measured(host, pull_s)
    assert (found.host.cores, found.host.harness_cores) == (host.cores, host.harness_cores)
    assert found.host.call_s < 0.02  # there is none: a call takes a second
    assert found.decode_base_s == pytest.approx(COST.decode_base_s, rel=0.05)
    assert found.decode_call_s == pytest.approx(COST.decode_call_s, rel=0.05)
    assert found.prompt_s == pytest.approx(1 / COST.prefill_tokens_per_s, rel=0.05)
    assert found.micro_step_s + 800 * found.train_token_s == pytest.approx(COST.train_s(800), rel=0.02)


def test_load_says_what_a_cell_would_have_done_alone() -> None:
    calls = [RecordedCall(0, 4, 1, 1, "a"), RecordedCall(2, 6, 1, 1, "b")]
    micro_steps = [RecordedMicroStep(3, 5, 1, "b")]  # inside a call of its cell: it computes once
    load = Load(calls, micro_steps, [(0, 8), (0, 8)], [(0, True)])
    one_core = Host(cores=1.0)
    assert load.alone_s(one_core, 0, 2) == pytest.approx(2)
    assert load.alone_s(one_core, 2, 4) == pytest.approx(1)
    assert load.alone_s(one_core, 1, 5) == pytest.approx(1 + 1 + 1)
    assert load.alone_s(Host(cores=1.0, harness_cores=1.0), 0, 2) == pytest.approx(1)  # beside one harness
    assert load.alone_s(Host(), 0, 8) == pytest.approx(8)


# -- a machine that is shared, simulated


def test_a_call_under_way_goes_on_more_slowly_and_its_prefill_too() -> None:
    cost = CostModel(decode_base_s=1.0, prefill_tokens_per_s=10.0)
    engine = Engine(cost, slots=4)
    execution = Execution("e", Query("q", 0.0, 0, 1), Script(0.0, (Turn(10, 20, 0, 0),), 0.0, 0.0), tokens_left=10)
    engine.add(0.0, execution, 20)
    assert engine.next_end() == pytest.approx(2 + 10)
    engine.slow(1.0, 2.0)  # in the middle of its prefill: 1 s of it is left
    assert engine.next_end() == pytest.approx(1 + 2 * (1 + 10))
    engine.slow(7.0, 1.0)  # 2 of 10 tokens are there
    assert engine.next_end() == pytest.approx(7 + 8)
    assert engine.pop_ended(15.0) is execution


def test_who_shares_one_core_takes_the_time_of_all_together() -> None:
    """Two cells of one call each and a trainer: with one core, everything is done one after the other."""

    class One(Kept):
        def query(self, number: int) -> list[Script]:
            return [Script(0.0, (Turn(100, 0, 0, 0.0),), 0.0, 400.0)] * 2

    workload = build(
        {
            "name": "two",
            "about": "",
            "cluster": {"cells": 3, "slots": 1},
            "run": {"steps": 1, "queries_per_step": 1, "group_size": 2, "max_staleness": 0, "tick_s": 0.0},
            "training": {"micro_step_tokens": 800.0},
            "cost": {"decode_base_s": 1.0, "train_tokens_per_s": 10.0, "commit_s": 5.0, "publish_s": 0.0},
        }
    )
    own, shared = (
        Simulator(workload.change(host=host), One(), "async").run().hours * 3600 for host in (Host(), Host(cores=1.0))
    )
    assert own == pytest.approx(100 + 80 + 5)
    assert shared == pytest.approx(2 * 100 + 80 + 5)


def test_a_trace_says_what_it_is_missing(tmp_path: Path) -> None:
    def folder(name: str, *events: dict[str, Any]) -> Path:
        run = tmp_path / name
        run.mkdir()
        (run / "config.toml").write_text(to_toml(RunConfig()))
        (run / "events.jsonl").write_text("".join(json.dumps({"t": 0.0, **event}) + "\n" for event in events))
        return run

    with pytest.raises(RecordError, match=r"has no events\.jsonl"):
        Trace(tmp_path)
    with pytest.raises(RecordError, match="no committed step"):
        Trace(folder("began", {"kind": "query", "query": "q", "state": "admitted"}))
    with pytest.raises(RecordError, match="trained nothing"):
        Trace(folder("all-alike", {"kind": "step", "step": 1}))
