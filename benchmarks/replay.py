"""The simulator against live runs: ``python benchmarks/replay.py [--steps 6] [--keep FOLDER] [--set KEY.PATH=VALUE]``.

The quickstart under every policy, one run each, pinned to cores as in policies.py. Each trace - the executions, and
a cost model measured from the run's own calls and events - is simulated under the policy that it ran under. Printed:
seconds live and simulated, from the first admitted query to the last committed step, and whether both give one order.
Runs on a quiet machine are a minute or two each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from opengyre.simulate.simulator import Simulator
from opengyre.simulate.trace import Trace
from policies import run

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "elastic": ("elastic", []),
    "elastic-plus": ("elastic-plus", []),
    "async": ("async", []),
    "lend": ("lend", []),
    "colocate": ("colocate", []),
    "colocate, carry-over": ("colocate", ["schedule.carry_over=true"]),
}


def main() -> None:
    """Run, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--keep", type=Path, help="put the run folders here; those that are there are not run again")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.only:
            policy, more = VARIANTS[name]
            folder = (args.keep or Path(temporary)) / name.replace(", ", "-")
            run_dir = folder / f"{policy}-0"
            if not run_dir.exists():
                run(policy, 0, args.steps, folder, [*more, *args.set])
            trace = Trace(run_dir)
            simulated = Simulator(trace.workload(), trace.source, policy).run().hours * 3600
            rows.append((name, trace.wall_s, simulated))
            print(f"{name:<22} live {trace.wall_s:6.1f} s, simulated {simulated:6.1f} s", flush=True)
    print(f"\n{'policy':<22} {'live s':>7} {'ratio':>6} {'simulated s':>12} {'ratio':>6} {'difference':>11}")
    for name, live, simulated in rows:
        ratios = live / rows[0][1], simulated / rows[0][2]
        difference = f"{simulated / live - 1:+.1%}"
        print(f"{name:<22} {live:>7.1f} {ratios[0]:>6.2f} {simulated:>12.1f} {ratios[1]:>6.2f} {difference:>11}")
    orders = [[name for name, *seconds in sorted(rows, key=lambda row: row[place])] for place in (1, 2)]
    print(f"order: {'the same' if orders[0] == orders[1] else 'live ' + ' < '.join(orders[0])}", end="")
    print("" if orders[0] == orders[1] else f"; simulated {' < '.join(orders[1])}")


if __name__ == "__main__":
    main()
