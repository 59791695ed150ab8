"""Scheduling policies on simulated runs: ``python benchmarks/scheduling.py [--sweep 200] [--draws 3] [--seed 0]``.

1. The shipped workloads: hours of each policy, over the lower bound too, beside what is published.
2. A sweep of random workloads: ``elastic-plus`` over ``elastic``, worst and quantiles, both over the lower bound.
3. One decision on 1,000 cells with 100,000 executions, and how many events a second the simulator goes through.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from opengyre.cells.policies import POLICIES, make_policy
from opengyre.cells.policies.base import CellView, Snapshot
from opengyre.cells.policies.survival import Survival
from opengyre.cells.state import CellState
from opengyre.simulate.compare import POLICIES as COMPARED
from opengyre.simulate.compare import Row, compare, table
from opengyre.simulate.simulator import Simulator
from opengyre.simulate.workload import Drawn, Workload, build, load_workload, shipped


def random_workload(random: np.random.Generator, number: int) -> Workload:
    """Anything from minutes to hours, few cells to many, training scarce to plentiful, switches cheap to dear."""

    def log(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    cells, slots = int(random.integers(2, 13)), int(log(8, 64))
    group, queries = int(random.choice([4, 8, 16])), int(random.integers(2, 13))
    median_h, sigma = log(0.005, 2.0), float(random.uniform(0.2, 1.2))
    mean_h = median_h * np.exp(sigma**2 / 2)
    rollout_h = mean_h * group * queries / slots  # cell hours a step
    switch_s = log(0.0005, 0.1) * median_h * 3600
    base = log(0.2, 10)  # a step of one call in calls that would take as long
    data: dict[str, Any] = {
        "name": f"random-{number}",
        "about": "",
        "seed": number,
        "cluster": {"cells": cells, "slots": slots},
        "run": {
            "steps": 12,
            "queries_per_step": queries,
            "group_size": group,
            "max_staleness": int(random.integers(0, 5)),
            "cooldown_s": switch_s,
            "tick_s": median_h * 3600 / 500,
        },
        "executions": {
            "median_h": median_h,
            "sigma": sigma,
            "within_query": float(random.choice([0.0, 0.2, 0.5])),
            "model_share": float(random.uniform(0.3, 0.95)),
            "turns": 5,
            "timeout_h": float(median_h * random.uniform(2, 8)) if random.random() < 0.7 else None,
            "timeout_pauses": bool(random.random() < 0.5),
            "boot_s": median_h * 20,
            "score_s": median_h * 40,
            "context": log(2e3, 2e5),
        },
        "training": {
            "cell_hours_per_step": float(rollout_h * log(0.05, 2.0)),
            "micro_steps_per_group": int(random.integers(1, 13)),
        },
        "cost": {
            "decode_base_s": 0.01 * base,
            "decode_call_s": 0.01 / slots,
            "prefill_tokens_per_s": log(1e5, 1e7),
            "hand_over_s": switch_s / 10,
            "commit_s": median_h * log(5, 100),
            "publish_s": median_h * 5,
            "pull_s": switch_s / 5,
            "to_train_s": switch_s,
            "to_rollout_s": switch_s / 2,
        },
    }
    return build(data)


class Swept(NamedTuple):
    """One random workload: hours over elastic's for every draw of executions; hours over the bound, of the first."""

    workload: Workload
    ratios: list[float]
    over_bound: tuple[float, float]
    about: str

    @property
    def mean(self) -> float:
        """Over the draws."""
        return statistics.fmean(self.ratios)


def sweep(count: int, draws: int, seed: int) -> None:
    """elastic-plus over elastic on random workloads.

    12 steps are so few that chance is worth a percent or two: any change of one decision, even one that is as good,
    makes a run that much shorter or longer. So each workload is drawn several times, and its mean is looked at.
    """
    random = np.random.default_rng(seed)
    workloads = [random_workload(random, number) for number in range(count)]
    with multiprocessing.Pool(min(2, os.cpu_count() or 1)) as pool:
        swept = []
        for one in pool.imap(partial(_swept, draws=draws), workloads):
            swept.append(one)
            if one.mean > 1.01:
                print(f"{one.workload.name}: {one.mean:.3f} ({_range(one.ratios)}), {one.about}", flush=True)
    means, singles = sorted(one.mean for one in swept), [ratio for one in swept for ratio in one.ratios]
    quantiles = {q: means[min(count - 1, int(q * count))] for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
    print(f"{count} random workloads, elastic-plus over elastic, mean of {draws} draws each: {_range(means)},", end=" ")
    print(
        f"mean {statistics.fmean(means):.3f}, quantiles " + ", ".join(f"{q:.0%} {r:.3f}" for q, r in quantiles.items())
    )
    print(f"  single draws above 1.02: {sum(r > 1.02 for r in singles)} of {len(singles)}, worst {max(singles):.3f}")
    for name, values in zip(("elastic-plus", "elastic"), zip(*(o.over_bound for o in swept), strict=True), strict=True):
        print(f"  {name} over the lower bound: median {statistics.median(values):.2f}, worst {max(values):.2f}")


def _swept(workload: Workload, draws: int) -> Swept:
    plus, elastic = compare(workload, ["elastic-plus", "elastic"])
    w, more = workload, range(1000, 999 + draws)
    ratios = [plus.hours / elastic.hours, *(_hours(w, "elastic-plus", k) / _hours(w, "elastic", k) for k in more)]
    about = (
        f"{w.cluster.cells} cells, staleness {w.run.max_staleness}, {w.run.queries_per_step} x {w.run.group_size}, "
        f"time-outs {plus.timeouts} / {elastic.timeouts}, switches {plus.outcome.switches} / {elastic.outcome.switches}"
    )
    return Swept(w, ratios, (plus.hours / plus.bound_hours, elastic.hours / elastic.bound_hours), about)


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def _hours(workload: Workload, policy: str, seed: int) -> float:
    return Simulator(workload, Drawn(workload, seed), policy).run().hours


def published() -> None:
    """The shipped workloads."""
    for name in shipped():
        workload = load_workload(name)
        rows = compare(workload, COMPARED)
        print(f"\n{workload.about}")
        print("\n".join("  " + line for line in table(rows)))
        by_policy = {row.policy: row for row in rows}
        _against(workload, by_policy)


def _against(workload: Workload, rows: dict[str, Row]) -> None:
    known = workload.published
    for policy, hours in known.hours.items():
        print(
            f"  {policy}: published {hours} h, here {rows[policy].hours:.2f} h ({rows[policy].hours / hours - 1:+.1%})"
        )
    for policy, (low, high) in known.ratios.items():
        ratio = rows[policy].hours / rows["elastic"].hours
        print(
            f"  {policy} over elastic: {ratio:.2f}, accepted {low} to {high}: {'yes' if low <= ratio <= high else 'NO'}"
        )
    if known.long_share is not None and known.long_timeouts is not None:
        o = rows["elastic"].outcome
        print(f"  queries >= 4 h: published {known.long_share:.1%}, here {o.long_share:.1%}", end="; ")
        print(f"timed out of those: published {known.long_timeouts:.1%}, here {o.long_timeouts:.1%}")


def decisions(cells: int = 1000, executions: int = 100_000) -> None:
    """Milliseconds of CPU time of one decision."""
    print(f"\none decision, {cells} cells, {executions} executions (best of 20):")
    workload = build({"name": "big", "about": "", "cluster": {"cells": cells, "slots": 128}})
    survival, random = Survival(), np.random.default_rng(0)
    for number, duration in enumerate(random.lognormal(8, 0.7, 3000).tolist()):
        survival.started(f"old-{number}", "old", 0.0)
        survival.ended(f"old-{number}", "old", duration)
    for number in range(executions):
        survival.started(f"e{number}", f"q{number // 16}", float(-random.random() * 7000))

    now, anew = 0.0, []
    survival.outlook(now, 16)  # the first one counts every age
    for _ in range(20):
        now += 0.05 * 3000  # as far apart as they are made: 5 % of a typical execution
        began = time.process_time()
        survival.outlook(now, 16)
        anew.append((time.process_time() - began) * 1e3)
    print(f"  an outlook over all of them, made anew: {min(anew):.1f} ms, median {statistics.median(anew):.1f} ms")
    outlook = survival.outlook(now, 16)
    views = [
        CellView(
            f"satellite-{n}" if n else "core",
            n == 0,
            CellState.TRAINING if n % 3 == 0 else CellState.ROLLOUT,
            3,
            n,
            0.0,
            n,
        )
        for n in range(cells)
    ]
    snapshot = Snapshot(
        now=1e4, cells=views, slots=128, queued=20_000, running=80_000, unfinished_groups=executions // 16,
        admissible_queries=0, claimable_micro_steps=50, step_open=True, step_full=False, version=3, step_groups=3,
        micro_step_s=60.0, next_group_s=outlook.next_group_s, step_eta_s=outlook.step_eta_s,
    )  # fmt: skip
    for name in POLICIES:
        policy = make_policy(workload.run_config(name))
        print(f"  {name:<13} {_best(lambda policy=policy: policy.decide(snapshot)):.2f} ms")


def _best(action: Any) -> float:
    times = []
    for _ in range(20):
        began = time.process_time()  # of this process alone: other work on the machine does not count
        action()
        times.append(time.process_time() - began)
    return min(times) * 1e3


def speed() -> None:
    """Events a second."""
    workload = load_workload("qwen3.8-2.4t")
    print("\nthe simulator, one 48-step run on 192 nodes:")
    for policy in ("elastic", "elastic-plus"):
        began = time.process_time()
        outcome = Simulator(workload, Drawn(workload), policy).run()
        took = time.process_time() - began
        print(
            f"  {policy:<13} {took:.2f} s of CPU, {outcome.events / took:,.0f} events/s, {outcome.decisions} decisions"
        )


def main() -> None:
    """All of it, or one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=int, default=200, help="random workloads")
    parser.add_argument("--draws", type=int, default=3, help="of the executions of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["published", "sweep", "decisions", "speed"])
    args = parser.parse_args()
    parts = {
        "published": published,
        "sweep": lambda: sweep(args.sweep, args.draws, args.seed),
        "decisions": decisions,
        "speed": speed,
    }
    for name, part in parts.items():
        if args.only in (None, name):
            part()


if __name__ == "__main__":
    main()
