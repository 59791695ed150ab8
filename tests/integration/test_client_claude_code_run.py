"""Unmodified Claude Code in whole runs: the embedded engine, the trainer, and cells that change role all the time.

The policy is random, so its turns are noise that is cut at the pin; what is shown is that noise is recorded exactly and
trained once, through the real client, whatever the cells do.
"""

from __future__ import annotations

import sys
from collections import Counter
from io import StringIO
from pathlib import Path
from pydoc_data.topics import topics  # half a megabyte of English that comes with Python
from typing import Any

import msgspec
import pytest

import policies
import tiny_run
from clients import check_trained_once, needs
from opengyre.config import RunConfig
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.run.collect import collect
from opengyre.run.inspect import replay
from opengyre.run.preflight import prepare
from opengyre.run.train import train
from opengyre.watch.events import read

needs("claude_code")

CONTEXT = 40_000  # the full prompt is 32k tokens by a tokenizer that knows some English, bare mode's 2k
REPLY = 40

# Rewards differ between the members of a group: the workspace's path ends in …-<member>-<attempt>/workspace.
EVALUATOR = """
import json, pathlib, re, sys
member = int(re.findall(r"-(\\d+)-\\d+", sys.argv[1])[-1])
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": float(member % 2), "checks": {}}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = policies.tokenizer(list(topics.values()), 4000)
    return tiny_run.make_model(tmp_path_factory.mktemp("model"), layers=1, context=CONTEXT, tokenizer=tokenizer)


def config_of(folder: Path, model: Path, context: int, bare: bool, **tables: dict[str, Any]) -> RunConfig:
    """A run in which Claude Code is asked to say something."""
    for split in ("train", "held_out"):
        task = folder / "tasks" / split / f"{split}-0"
        (task / "evaluator").mkdir(parents=True)
        (task / "evaluator" / "check.py").write_text(EVALUATOR)
        (task / "instruction.md").write_text("Say something.")
        command = [sys.executable, "{task}/check.py", "{workspace}", "{reward}"]
        (task / "task.toml").write_text(f"evaluator = {command!r}\n[deadlines]\nagent_s = 300.0\n")
    config = tiny_run.config(
        folder,
        model,
        harness={"kind": "claude_code", "command": [], "options": {"bare": bare, "reply_tokens": REPLY}},
        sampling={"max_tokens": REPLY},
        eval={"every": -1},
        **tables,
    )
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, context=context))


def check_run(config: RunConfig, executions: int) -> None:
    """Every execution ended by itself, every path rebuilds, each token can be and was trained at most once."""
    run_dir = Path(config.run_dir)
    checked, differences = replay(run_dir)
    assert differences == [] and checked.executions == executions and checked.calls >= executions
    done = [e for e in read(run_dir / "events.jsonl") if e["kind"] == "execution" and e["state"] == "done"]
    assert {e["outcome"] for e in done} == {"finished"}
    with Store.open(run_dir / "calls.db", readonly=True) as store:
        for execution in store.executions():
            tree = store.load_tree(execution.execution_id)
            roles = assign_roles(tree)
            assert set(roles.values()) == {"main"}
            check_trained_once(tree, roles)
            samples = (execution.outcome or {}).get("samples", [])
            trained = Counter(node for sample in samples for node in sample["nodes"])
            assert not trained or max(trained.values()) == 1


def test_training_through_claude_code_while_cells_change_role(tmp_path: Path, model: Path) -> None:
    config = config_of(
        tmp_path,
        model,
        4096,
        bare=True,
        steps=2,
        cells={"satellites": 2, "slots": 2, "max_batch": 4, "kv_tokens": 16_384},
        schedule={"policy": "churn:Churn", "cooldown_s": 0.3},
        samples={"group_size": 4, "queries_per_step": 1},
        train={"micro_step_tokens": 8192, "clip_low": 0.2, "clip_high": 0.2},
    )
    summary = train(prepare(config, Path(config.run_dir), resume=False), StringIO())
    assert (summary.steps, summary.version) == (2, 2)
    check_run(config, 8)
    events = list(read(Path(config.run_dir) / "events.jsonl"))
    assert sum(e["tokens"] for e in events if e["kind"] == "step") > 0
    assert [e for e in events if e["kind"] == "switch"]


def test_the_full_tool_set_through_the_embedded_engine(tmp_path: Path, model: Path) -> None:
    config = config_of(
        tmp_path,
        model,
        CONTEXT,
        bare=False,
        cells={"satellites": 1, "slots": 1, "max_batch": 1, "kv_tokens": CONTEXT, "heartbeat_s": 120.0},
        schedule={"policy": "colocate"},
    )
    prepared = prepare(config, Path(config.run_dir), resume=False)
    collected = collect(prepared, executions=1, engine=None, split="train", limit=1, say=lambda _: None)
    assert len(collected.rewards) == 1
    check_run(config, 1)
