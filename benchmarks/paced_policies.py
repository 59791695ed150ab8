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
from opengyre.simulate.workload import load_workload
from opengyre.watch.events import read

WORKLOAD = "qwen3.8-2.4t"
CELLS, QUERIES, GROUP, SLOTS = 8, 4, 8, 8
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
    """Changes to the workload file, training speed included: real tokens are what real executions sample."""
    change = SHAPE | {"run.steps": steps}
    w = load_workload(WORKLOAD).change(**change)
    e = w.executions
    sampled = w.executions.median_h * 3600 * e.model_share / w.reference_token_s
    unique = sampled * (1 + e.prompt_per_sampled)
    mean = 1.25  # mean over median of these durations, capped at the time-out
    tokens = QUERIES * GROUP * unique * mean
    return change | {"cost.train_tokens_per_s": tokens / (w.training.cell_hours_per_step * 3600)}


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
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    policies = options.policy or ["elastic", "elastic-plus", "colocate", "async"]
    change = shape(options.steps)
    for policy in ("async", "lend"):
        change[f"policies.{policy}"] = {"train_cells": 1}  # with the core 2 of 8, as 1 of 4
    simulated = {row.policy: row for row in compare(load_workload(WORKLOAD).change(**change), policies)}
    out = options.out or Path(tempfile.mkdtemp(prefix="opengyre-paced-"))
    first = 0.0
    for policy in policies:
        run = out / policy
        train(
            prepare(paced_config(WORKLOAD, policy, run, speed=options.speed, change=change), run, resume=False),
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
