"""Whole paced runs: a cluster's hours in seconds, with real harnesses, proxy, tree, ledger and switches."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from opengyre.paced.workload import paced_config
from opengyre.run.inspect import replay
from opengyre.run.preflight import prepare
from opengyre.run.train import train
from opengyre.simulate.cost import CostModel
from opengyre.simulate.simulator import Simulator
from opengyre.simulate.trace import UNLIMITED, Trace
from opengyre.simulate.workload import Drawn, load_workload
from opengyre.watch.events import read

SMALL = {
    "run.steps": 2,
    "run.queries_per_step": 2,
    "run.group_size": 3,
    "cluster.slots": 3,
    "cluster.cells": 3,
    "executions.turns": 3,
    "training.cell_hours_per_step": 1.0,
    "cost.train_tokens_per_s": 40.0,  # an execution of some 100k tokens trains for most of an hour
}


@pytest.mark.parametrize("policy", ["elastic", "elastic-plus", "colocate", "async"])
def test_a_workload_is_played_by_real_harnesses(tmp_path: Path, policy: str) -> None:
    run = tmp_path / "run"
    config = paced_config("qwen3.8-2.4t", policy, run, speed=3600.0, change=SMALL)
    train(prepare(config, run, resume=False), io.StringIO())
    events = list(read(run / "events.jsonl"))
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2]
    done = [e for e in events if e["kind"] == "execution" and e["state"] == "done"]
    assert len(done) == 12 and all(e["outcome"] in ("finished", "timed_out") for e in done)
    assert events[-1]["t"] > 3600  # hours of the modelled cluster
    if policy == "colocate":  # it cannot do without
        switches = [e for e in events if e["kind"] == "switch" and e["ok"]]
        assert switches and all(e["total_s"] >= CostModel().to_rollout_s for e in switches)  # in the cluster's seconds
    checked, differences = replay(run, None)
    assert checked.executions == 12 and not differences
    trace = Trace(run)
    assert trace.source.by_j_max() == {"1": 1.0, "5": 1.0, UNLIMITED: 1.0}  # this harness does not branch
    outcome = Simulator(trace.workload(), trace.source, policy).run()
    assert (outcome.steps, outcome.executions) == (2, 12)


def test_lost_cells_cost_a_run_nothing_but_time(tmp_path: Path) -> None:
    """A satellite and the core are lost, under real harnesses: as many executions are trained, once each."""
    run = tmp_path / "run"
    losses = {"cluster.lost_at_h": {"satellite-1": [0.5], "core": [1.5, 3.0]}}
    config = paced_config("qwen3.8-2.4t", "elastic", run, speed=3600.0, change=SMALL | losses)
    train(prepare(config, run, resume=False), io.StringIO())
    events = list(read(run / "events.jsonl"))
    assert [(e["step"], e["executions"]) for e in events if e["kind"] == "step"] == [(1, 6), (2, 6)]
    replaced = [e["text"] for e in events if e["kind"] == "note" and "is replaced" in e["text"]]
    assert len(replaced) == 3 and all("lost" in text for text in replaced)
    checked, differences = replay(run, None)
    assert checked.executions == 12 and not differences
    simulated = load_workload("qwen3.8-2.4t").change(**SMALL, **losses)
    outcome = Simulator(simulated, Drawn(simulated), "elastic").run()
    assert (outcome.failures, outcome.steps, outcome.executions) == (3, 2, 12)
    trace = Trace(run)
    lost = trace.workload().cluster.lost_at_h
    assert {cell: len(hours) for cell, hours in lost.items()} == {"satellite-1": 1, "core": 2}
    outcome = Simulator(trace.workload(), trace.source, "elastic").run()
    assert (outcome.failures, outcome.steps, outcome.executions) == (3, 2, 12)
    assert trace.cost().restart_s >= CostModel().restart_s
