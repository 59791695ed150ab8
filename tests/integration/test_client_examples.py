"""The cluster example, shortened: unmodified Claude Code does chores on a cluster that is only modelled."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from clients import needs
from opengyre.config import load
from opengyre.run.inspect import replay
from opengyre.run.preflight import prepare
from opengyre.run.train import train
from opengyre.watch.events import read

needs("claude_code")

ROOT = Path(__file__).parents[2]


def test_a_cluster_is_dry_run_with_claude_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the example's paths are relative to it
    run = tmp_path / "run"
    changed = [f"run_dir='{run}'", f"tasks.path='{tmp_path / 'tasks'}'", "paced.speed=60.0", "watch.live='off'"]
    smaller = ["steps=1", "samples.queries_per_step=2", "samples.group_size=3", "schedule.max_staleness=0"]
    config = load(ROOT / "examples/cluster/cluster.toml", [*changed, *smaller])
    summary = train(prepare(config, run, resume=False), StringIO())
    assert summary.steps == 1
    events = list(read(run / "events.jsonl"))
    done = [e for e in events if e["kind"] == "execution" and e["state"] == "done"]
    assert len(done) == 6 and {e["outcome"] for e in done} == {"finished"}
    assert all(e["calls"] >= 3 and e["leaves"] == {"main": 1} for e in done)  # read, work, say so
    assert any(e["reward"] > 0 for e in done)  # the demonstrator does more than half of its chores right
    checked, differences = replay(run)
    assert checked.executions == 6 and not differences
