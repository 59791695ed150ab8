"""Whole runs on a random policy: real processes, real HTTP, real switches; and what must hold whatever the policy."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from opengyre.config import RunConfig
from opengyre.record.store import Store
from opengyre.run.conductor import Conductor
from opengyre.run.inspect import draw_execution, replay
from opengyre.run.journal import Journal
from opengyre.run.parts import Parts, assemble_parts
from opengyre.run.preflight import claim_run_dir, prepare
from opengyre.run.train import train
from opengyre.watch.events import EventLog, read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_model(tmp_path_factory.mktemp("model"))


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read(run_dir / "events.jsonl") if e["kind"] == kind]


def assert_trained_once(run_dir: Path, config: RunConfig) -> None:
    """SPEC §3.5 and §3.10: each query in one step, each sampled token in at most one sample, every path rebuilds."""
    journal = Journal(run_dir / "run.db")
    by_step = Counter(row.trained_step for row in journal.queries("train"))
    assert by_step == dict.fromkeys(range(1, config.steps + 1), config.samples.queries_per_step)
    assert [s["step"] for s in journal.steps()] == list(range(1, config.steps + 1))
    journal.close()
    said = [e["query"] for e in events_of(run_dir, "query") if e["state"] == "trained"]
    assert len(said) == len(set(said))
    checked, differences = replay(run_dir)
    assert differences == [] and checked.calls > 0
    with Store.open(run_dir / "calls.db", readonly=True) as store:
        for execution in store.executions():
            samples = (execution.outcome or {}).get("samples", [])
            tree = store.load_tree(execution.execution_id)
            sampled = sum(call.sampled_tokens for call in tree.calls())
            assert sum(s["tokens"] for s in samples) <= sampled
            nodes = Counter(node for s in samples for node in s["nodes"])
            assert all(count == 1 for count in nodes.values())


@pytest.mark.parametrize("policy", ["elastic", "colocate", "async", "lend"])
def test_every_policy_trains_the_same_queries(tmp_path: Path, model: Path, policy: str) -> None:
    config = tiny_run.config(tmp_path, model, schedule={"policy": policy, "cooldown_s": 0.0}, steps=3)
    summary = train(prepare(config, Path(config.run_dir), resume=False), StringIO())
    run_dir = Path(config.run_dir)
    assert (summary.steps, summary.version) == (3, 3)
    assert summary.before is not None and summary.after is not None
    assert_trained_once(run_dir, config)
    steps = events_of(run_dir, "step")
    assert [s["version"] for s in steps] == [1, 2, 3]
    assert all(s["staleness_max"] is None or s["staleness_max"] <= 1 for s in steps)
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert "main" in draw_execution(run_dir, "q000000-00-0")
    if policy == "colocate":
        directions = {s["direction"] for s in events_of(run_dir, "switch")}
        assert directions == {"rollout>train", "train>rollout"}


def test_no_harness_notices_that_cells_change_role_all_the_time(tmp_path: Path, model: Path) -> None:
    """SPEC §3.7: many switches while calls run; every execution finishes as if there were none."""
    schedule = {"policy": "churn:Churn", "cooldown_s": 0.02}
    config = tiny_run.config(
        tmp_path, model, schedule=schedule, steps=4, sampling={"max_tokens": 150}, train={"kl_weight": 0.01}
    )
    train(prepare(config, Path(config.run_dir), resume=False), StringIO())
    run_dir = Path(config.run_dir)
    assert_trained_once(run_dir, config)
    switches = events_of(run_dir, "switch")
    assert len(switches) >= 10 and sum(s["moved_calls"] for s in switches) >= 5
    done = [e for e in events_of(run_dir, "execution") if e["state"] == "done"]
    assert {e["outcome"] for e in done} == {"finished"} and {e["calls"] for e in done} == {3}
    assert sum(e["moves"] for e in done) >= 5
    assert sum(s["tokens"] for s in events_of(run_dir, "step")) > 0


async def conduct(config: RunConfig, meanwhile: Callable[[Parts, EventLog], Any]) -> None:
    """Run, with ``meanwhile(parts, events)`` listening in."""
    prepared = prepare(config, Path(config.run_dir), resume=False)
    lock = claim_run_dir(prepared)
    events = EventLog(prepared.run_dir / "events.jsonl")
    try:
        async with assemble_parts(prepared, events) as parts:
            meanwhile(parts, events)
            await Conductor(parts).run()
    finally:
        events.close()
        lock.close()


def killer(
    cell: str, when: Callable[[dict[str, Any]], bool], number: signal.Signals = signal.SIGKILL
) -> Callable[[Parts, EventLog], None]:
    """Send a signal to a cell's process the first time an event says so."""

    def start(parts: Parts, events: EventLog) -> None:
        armed = [True]

        def listen(event: dict[str, Any]) -> None:
            if armed and when(event):
                armed.clear()
                os.kill(parts.controller.cells[cell].process.pid, number)

        events.listen(listen)

    return start


@pytest.mark.parametrize(
    ("cell", "when"),
    [
        ("satellite-1", lambda e: e["kind"] == "execution" and e["state"] == "done" and e["split"] == "train"),
        ("satellite-2", lambda e: e["kind"] == "micro_step" and e["cell"] == "satellite-2" and e["state"] == "claimed"),
        (
            "core",
            lambda e: e["kind"] == "micro_step" and e["cell"] == "core" and e["state"] == "done" and e["step"] == 2,
        ),
    ],
    ids=["rolling-out", "in-a-micro-step", "core"],
)
def test_a_cell_that_dies_costs_nothing_but_time(
    tmp_path: Path, model: Path, cell: str, when: Callable[[dict[str, Any]], bool]
) -> None:
    config = tiny_run.config(tmp_path, model, steps=3)
    asyncio.run(conduct(config, killer(cell, when)))
    run_dir = Path(config.run_dir)
    assert_trained_once(run_dir, config)
    steps = events_of(run_dir, "step")
    assert [e["step"] for e in steps] == [1, 2, 3]
    learned = [e["degenerate"] < e["groups"] for e in steps]  # what a random policy's groups may all be
    assert [e["version"] for e in steps] == list(accumulate(map(int, learned)))
    outcomes = Counter(e["outcome"] for e in events_of(run_dir, "execution") if e["state"] == "done")
    assert set(outcomes) == {"finished"}


def hangs(tmp_path: Path, model: Path, cell: str, when: Callable[[dict[str, Any]], bool], **cells: float) -> None:
    config = tiny_run.config(tmp_path, model, cells=cells)
    asyncio.run(conduct(config, killer(cell, when, signal.SIGSTOP)))
    run_dir = Path(config.run_dir)
    assert_trained_once(run_dir, config)
    assert any(f"{cell} is replaced" in e["text"] for e in events_of(run_dir, "note"))
    assert {e["outcome"] for e in events_of(run_dir, "execution") if e["state"] == "done"} == {"finished"}


def test_a_cell_that_hangs_is_replaced_and_no_harness_notices(tmp_path: Path, model: Path) -> None:
    """Alive but silent: found by the probe, its calls go on elsewhere."""

    def when(event: dict[str, Any]) -> bool:
        return event["kind"] == "execution" and event["state"] == "done" and event["split"] == "train"

    hangs(tmp_path, model, "satellite-1", when, heartbeat_s=2.0)


def test_a_core_that_hangs_is_replaced(tmp_path: Path, model: Path) -> None:
    """Silent in a call that has no lease: found by the call that it leaves unanswered."""

    def when(event: dict[str, Any]) -> bool:
        return event["kind"] == "micro_step" and event["cell"] == "core" and event["state"] == "claimed"

    hangs(tmp_path, model, "core", when, silence_s=15.0)
