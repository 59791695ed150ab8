"""Wall-clock of the scheduling policies on one workload: ``python benchmarks/policies.py [--repeats 3] [--steps 8]``.

The quickstart's tasks, policy and cells, pinned to cores; the policies take turns, so that a machine that slows down
slows all of them. Time runs from the first admitted query to the last committed step; evaluation is off. Prints each
repeat, then per policy the median, its ratio to ``elastic``, and the share of cell time spent working.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from opengyre.watch.events import read

POLICIES = ("elastic", "colocate", "async", "lend")


def run(policy: str, seed: int, steps: int, folder: Path, more: list[str]) -> dict[str, Any]:
    """One run; its figures."""
    run_dir = folder / f"{policy}-{seed}"
    settings = [f"schedule.policy={policy}", f"seed={seed}", f"steps={steps}", f"run_dir={run_dir}"]
    settings += ["eval.every=-1", "cells.pin=true", "watch.report=false", *more]
    command = [sys.executable, "-m", "opengyre", "train", "quickstart"]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = list(read(run_dir / "events.jsonl"))
    began = next(e["t"] for e in events if e["kind"] == "query")
    committed = [e for e in events if e["kind"] == "step"]
    done = [e for e in events if e["kind"] == "execution" and e["state"] == "done"]
    return {
        "seconds": committed[-1]["t"] - began,
        "executions": sum(e["executions"] for e in committed),
        "switches": sum(e["kind"] == "switch" for e in events),
        "timed_out": sum(e["outcome"] == "timed_out" for e in done),
        "tokens": sum(e["tokens"] for e in committed),
    }


def main() -> None:
    """Run all, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES[:3]))
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for policy in args.policies:
                figures = run(policy, repeat, args.steps, Path(folder), args.set)
                rows[policy].append(figures)
                print(
                    f"{policy:<9} repeat {repeat}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True
                )
    base = statistics.median(f["seconds"] for f in rows[args.policies[0]])
    print(f"\n{'policy':<9} {'median s':>9} {'min':>7} {'max':>7}  ratio to {args.policies[0]}")
    for policy, figures in rows.items():
        seconds = sorted(f["seconds"] for f in figures)
        median = statistics.median(seconds)
        print(f"{policy:<9} {median:>9.1f} {seconds[0]:>7.1f} {seconds[-1]:>7.1f}  {median / base:.2f}")


if __name__ == "__main__":
    main()
