"""Policies against each other on a paced cluster: real proxy, harnesses, ledger and switches, modelled time.

    python benchmarks/paced_policies.py [--speed 120] [--steps 4] [--policy elastic --policy async …]

A workload shaped as the published 2.4T run, on 8 cells: per step the same hours of training and of rollout for each
cell as in the shipped file, with fewer executions (32 a step) on fewer slots. Policies run one after the other, on the
same drawn executions. Printed per policy: modelled hours from the first admission to the last commit, the ratio to the
first policy and to the lower bound, what the simulator says for the same workload, executions trained and timed out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from opengyre.paced.workload import paced_config
from opengyre.run.preflight import prepare
from opengyre.run.train import train
from opengyre.simulate.compare import compare
from opengyre.simulate.script import Script
from opengyre.simulate.workload import Drawn, load_workload
from opengyre.watch.events import read

WORKLOAD = "qwen3.8-2.4t"
CELLS, QUERIES, GROUP, SLOTS = 8, 4, 8, 8
TOKEN_SCALE = 512.0
TEMPLATE_TOKENS = 8.5  # a turn's of the shipped policy's chat template, as recorded
SHAPE: dict[str, Any] = {
    "cluster.cells": CELLS,
    "cluster.slots": SLOTS,
    "run.queries_per_step": QUERIES,
    "run.group_size": GROUP,
    # The shipped file has 2.72 cell hours of training a step on 4 cells: twice that on 8 is as long a step.
    "training.cell_hours_per_step": 5.44,
    # What makes a slot as fast as one of the 150 of the shipped file: the batch is 19 times smaller.
    "cost.decode_call_s": 0.0002 * 150 / SLOTS,
}


def shape(steps: int) -> dict[str, Any]:
    """Changes to the workload file. Training speed is among them: what the executions' real tokens, chat template
    included, take to train is what the workload says that it takes."""
    change = SHAPE | {"run.steps": steps}
    w = load_workload(WORKLOAD).change(**change)
    scripts = [script for number in range(steps * QUERIES) for script in Drawn(w).query(number)]
    real = sum(_real_tokens(script) for script in scripts)
    seconds = sum(script.train_tokens for script in scripts) / w.cost.train_tokens_per_s
    return change | {"cost.train_tokens_per_s": real / seconds}


def _real_tokens(script: Script) -> float:
    """Modelled tokens of an execution's recorded tree: what is sampled and read, but for what is read last."""
    text = sum(turn.tokens + turn.prompt_tokens for turn in script.turns) - script.turns[-1].prompt_tokens
    return text + TOKEN_SCALE * TEMPLATE_TOKENS * len(script.turns)


def hours(run: Path) -> tuple[float, int, int]:
    """(hours between first admission and last commit, executions trained, executions that timed out)."""
    events = list(read(run / "events.jsonl"))
    first = next(e["t"] for e in events if e["kind"] == "query")
    steps = [e for e in events if e["kind"] == "step"]
    late = sum(e["kind"] == "execution" and e.get("outcome") == "timed_out" for e in events)
    return (steps[-1]["t"] - first) / 3600, sum(e["executions"] for e in steps), late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", type=float, default=120.0, help="modelled seconds in one of ours")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--policy", action="append", help="elastic, elastic-plus, colocate, async")
    parser.add_argument("--lose", action="append", default=[], metavar="CELL=HOUR", help="lose a cell, in both")
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    policies = options.policy or ["elastic", "elastic-plus", "colocate", "async"]
    change = shape(options.steps)
    lost: dict[str, list[float]] = {}
    for one in options.lose:
        cell, _, hour = one.partition("=")
        lost.setdefault(cell, []).append(float(hour))
    change["cluster.lost_at_h"] = lost
    for policy in ("async", "lend"):
        change[f"policies.{policy}"] = {"train_cells": 1}  # with the core 2 of 8, as 1 of 4
    simulated = {row.policy: row for row in compare(load_workload(WORKLOAD).change(**change), policies)}
    out = options.out or Path(tempfile.mkdtemp(prefix="opengyre-paced-"))
    first = 0.0
    for policy in policies:
        run = out / policy
        train(
            prepare(
                paced_config(WORKLOAD, policy, run, speed=options.speed, token_scale=TOKEN_SCALE, change=change),
                run,
                resume=False,
            ),
            _Quiet(),
        )
        took, trained, late = hours(run)
        first = first or took
        row = simulated[policy]
        print(
            f"{policy:14} {took:6.2f} h = {took / first:4.2f}x {policies[0]}, {took / row.bound_hours:4.2f}x the bound;"
            f" simulated {row.hours:6.2f} h, {took / row.hours - 1:+.1%};"
            f" {trained} executions trained, {late} timed out",
            flush=True,
        )


class _Quiet:
    """A terminal that nobody reads."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


if __name__ == "__main__":
    sys.exit(main())
