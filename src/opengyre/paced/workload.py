"""A workload file played by real processes: its executions as harnesses, its durations at ``paced.speed``.

    Workload ─▶ Drawn.query(n) ─▶ scripts ─▶ one plan per execution ─▶ harness.py, through the real proxy

Executions are the very ones that ``opengyre simulate`` draws from the same file and seed, so that a simulated and a
paced run can be compared. The time that processes of ours take to start belongs to the boot and the evaluator's time of
the workload, as far as it fits in there: it is no part of the cluster's.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from opengyre.config import HarnessConfig, RunConfig, TasksConfig, build
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Launch
from opengyre.executions.harness.command import client_variables
from opengyre.executions.options import harness_options, read_options
from opengyre.executions.task import Deadlines, Task
from opengyre.paced.speech import FILLER
from opengyre.simulate.script import Script
from opengyre.simulate.workload import Drawn, Workload, load_workload

HARNESS_FILE = Path(__file__).with_name("harness.py")
_EXECUTION = re.compile(r"/x/q0*(\d+)-(\d+)-\d+$")  # query, member, attempt: executions/groups.py
_EVALUATOR = """
import os, sys, time, zlib
workspace, reward, score_s = sys.argv[1:]
done = os.path.join(workspace, "done")
began = os.stat(done).st_mtime if os.path.exists(done) else time.time()
time.sleep(max(0.0, float(score_s) - (time.time() - began)))
passed = os.path.exists(done) and zlib.crc32(os.path.basename(os.path.dirname(workspace)).encode()) % 2
with open(reward, "w") as file:
    file.write('{"reward": %.1f, "checks": {}}' % passed)
"""  # imports as little as possible: they take longer than the rest


class Options(msgspec.Struct, frozen=True):
    """``workload`` names a file; ``speed`` and ``token_scale`` are those of ``[paced]``; ``change`` are other values of
    the file by dotted key."""

    workload: str
    speed: float
    token_scale: float = 1.0
    change: dict[str, Any] = {}

    @property
    def changed(self) -> Workload:
        """The workload. Raises ConfigError."""
        return load_workload(self.workload).change(**self.change)


class PacedTasks:
    """``tasks.kind = "opengyre.paced.workload:PacedTasks"``: as many equal tasks as a run asks for."""

    def __init__(self, config: TasksConfig) -> None:
        options = read_options(config.options, Options, "tasks.options")
        e = options.changed.executions
        if e.timeout_h is not None and not e.timeout_pauses:
            raise ConfigError("false", where="executions.timeout_pauses", right="true: live deadlines stop while held")
        limit_s = 1e9 if e.timeout_h is None else e.timeout_h * 3600
        boot_s, self._score_s = e.boot_s / options.speed, e.score_s / options.speed
        spare = Deadlines().evaluator_s  # for a process that is slow to start
        self._deadlines = Deadlines(agent_s=limit_s / options.speed + boot_s, evaluator_s=self._score_s + spare)
        self._count = config.train

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split; nothing is held out."""
        return [self._task(n) for n in range(self._count)] if split == "train" else []

    def _task(self, number: int) -> Task:
        return Task(
            task_id=f"paced-{number:04d}",
            instruction="Follow the plan.",
            files={},
            evaluator=[sys.executable, "-ISB", "{task}/evaluate.py", "{workspace}", "{reward}", str(self._score_s)],
            evaluator_files={"evaluate.py": _EVALUATOR},
            deadlines=self._deadlines,
        )


class PacedHarness:
    """``harness.kind = "paced"``: each execution follows the script drawn for it."""

    name = "paced"

    def __init__(self, config: HarnessConfig) -> None:
        self._options = harness_options(config, Options)
        source = Drawn(self._options.changed)
        self._query = lru_cache(maxsize=256)(source.query)

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The harness with its plan on stdin."""
        found = _EXECUTION.search(base_url)
        if found is None:
            raise ConfigError(base_url, where="harness.kind paced", right="executions of a training run")
        scripts = self._query(int(found[1]))
        plan = self._plan(scripts[int(found[2]) % len(scripts)])
        argv = [sys.executable, "-I", "-S", str(HARNESS_FILE)]
        return Launch(argv, client_variables(base_url, key, model), json.dumps(plan), [str(HARNESS_FILE)])

    def _plan(self, script: Script) -> dict[str, Any]:
        o = self._options
        turns = [
            {
                "sample": max(1, round(turn.tokens / o.token_scale)),
                "read": FILLER * max(1, round(turn.prompt_tokens / o.token_scale)),
                "tool_s": turn.tool_s / o.speed,
            }
            for turn in script.turns
        ]
        return {"ready": time.time() + script.boot_s / o.speed, "turns": turns}


def paced_config(
    workload: str,
    policy: str,
    run_dir: Path,
    *,
    speed: float,
    token_scale: float = 512.0,
    change: dict[str, Any] | None = None,
) -> RunConfig:
    """The config of a paced run of a workload under a policy.

    The shipped policy's tokenizer and template are used: with ``token_scale`` an execution must fit into its context.
    Raises ConfigError.
    """
    options = {"workload": workload, "speed": speed, "token_scale": token_scale, "change": change or {}}
    w = load_workload(workload).change(**(change or {}))
    data = msgspec.to_builtins(w.run_config(policy))
    data |= {
        "run_dir": str(run_dir),
        "name": f"{w.name}-{policy}",
        "steps": w.run.steps,
        "tasks": {"kind": "opengyre.paced.workload:PacedTasks", "train": w.run.queries_per_step, "options": options},
        "harness": {"kind": "paced", "options": options},
        "model": {"path": "quickstart"},
        "sandbox": {"kind": "local"},
        "paced": {
            "speed": speed,
            "cost": msgspec.to_builtins(w.cost),
            "token_scale": token_scale,
            "cell_mtbf_h": w.cluster.cell_mtbf_h,
            "lost_at_h": w.cluster.lost_at_h,
        },
        "eval": {"every": -1},
        "watch": {"live": "off"},
    }
    data["train"] |= {"micro_step_tokens": max(64, int(w.micro_step_tokens / token_scale)), "lease_s": 1e6}
    data["executions"] |= {"max_calls": 10_000}
    return build(data)
