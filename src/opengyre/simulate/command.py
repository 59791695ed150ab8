"""``opengyre simulate`` and ``opengyre plan`` on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opengyre.simulate.plan import Planned
    from opengyre.simulate.workload import Source, Workload


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register both commands."""
    simulate = commands.add_parser(
        "simulate",
        parents=[common],
        help="go through a whole run in seconds, one policy beside the other",
        description="Real scheduling policies over executions and cells that only pass time. docs/scheduling.md says"
        " what is modelled, what is assumed, and how far it can be trusted.",
    )
    _what(simulate)
    simulate.add_argument("--list", action="store_true", help="name the shipped workloads")
    simulate.add_argument("--policy", action="append", metavar="NAME", help="may be given several times (default: all)")
    simulate.add_argument("--json", action="store_true", help="one JSON object a line, one per policy")
    simulate.add_argument("--out", type=Path, metavar="FOLDER", help="event log and report (timelines) of each policy")
    simulate.add_argument("--sensitivity", action="store_true", help="hours at both ends of each assumption's range")
    simulate.add_argument("--seed", type=int, help="draw other executions (default: the workload's own seed)")
    simulate.set_defaults(run=run_simulate)

    plan = commands.add_parser(
        "plan",
        parents=[common],
        help="find the cluster for a workload: cells, split, slots, staleness, trajectories",
        description="Tries configurations in the simulator; prints the best with their uncertainty over seeds.",
    )
    _what(plan)
    plan.add_argument("--objective", choices=("time", "gpu-hours"), default="time", help="per step (default: time)")
    plan.add_argument("--policy", action="append", metavar="NAME", help="default: elastic-plus and every async split")
    plan.add_argument("--cells", type=_numbers, default=(), metavar="N,N,…", help="default: half, as is, twice")
    plan.add_argument("--slots", type=_numbers, default=(), metavar="N,N,…", help="default: half, as is, 1.5 times")
    plan.add_argument("--staleness", type=_numbers, default=(), metavar="N,N,…", help="default: as is, 2 less, 2 more")
    plan.add_argument(
        "--j-max",
        type=lambda text: text.split(","),
        default=(),
        metavar="J,J,…",
        help="default: all that the workload knows",
    )
    plan.add_argument("--seeds", type=int, default=5, help="draws for the best configurations (default: 5)")
    plan.add_argument("--steps", type=int, default=8, help="steps to simulate of each (default: 8)")
    plan.add_argument("--json", action="store_true", help="one JSON object a line, best first")
    plan.set_defaults(run=run_plan)


def _what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", nargs="?", help="a shipped workload, or a TOML file")
    parser.add_argument("--trace", type=Path, metavar="RUN", help="the folder of a recorded run, instead of a workload")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a key of the workload"
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: whole numbers with commas between them") from None


def _load(
    args: argparse.Namespace, *, accidents: bool = True
) -> tuple[Workload, Callable[[Workload, int | None], Source], float | None]:
    """The workload, what makes its executions for a seed, and the recorded wall-clock in seconds if it is a trace.
    ``accidents``: whether cells are lost where the recorded run lost them."""
    import tomllib

    from opengyre.errors import ConfigError
    from opengyre.simulate.trace import Trace
    from opengyre.simulate.workload import Drawn, load_workload, shipped

    if (args.workload is None) == (args.trace is None):
        right = f"one workload ({', '.join(shipped())}, or a file), or --trace RUN"
        raise ConfigError("what to simulate is not clear", where="opengyre", right=right)
    changes: dict[str, Any] = {}
    for override in args.set:
        key, eq, text = override.partition("=")
        if not eq:
            raise ConfigError(f"{override!r}", where="--set", right="key.path=value")
        try:
            changes[key.strip()] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = text
    if args.trace is None:
        return load_workload(args.workload).change(**changes), Drawn, None
    trace = Trace(args.trace)
    if not accidents:
        changes = {"cluster.lost_at_h": {}, **changes}
    return trace.workload().change(**changes), trace.source.drawn, trace.wall_s


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate and print."""
    import msgspec

    from opengyre.simulate.compare import POLICIES, compare, table
    from opengyre.simulate.workload import load_workload, shipped

    if args.list:
        for name in shipped():
            sys.stdout.write(f"{name:<28} {load_workload(name).about}\n")
        return 0
    workload, source, wall_s = _load(args)
    if args.sensitivity:
        return _sensitivity(workload, args)
    rows = compare(
        workload,
        args.policy or POLICIES,
        source=source(workload, args.seed),
        folder=args.out,
        on_row=lambda row: _write(msgspec.json.encode(row.plain()).decode()) if args.json else None,
    )
    if args.json:
        return 0
    _write(f"{workload.name}: {workload.about}")
    _say_host(workload)
    for line in table(rows):
        _write(line)
    if wall_s is not None:
        _write(f"recorded: {wall_s / 3600:.3f} h = {wall_s:.1f} s from the first query to the last step")
    for row in rows:
        if row.report:
            _write(f"report: {row.report}")
    return 0


def _sensitivity(workload: Workload, args: argparse.Namespace) -> int:
    from opengyre.simulate.sensitivity import lines

    for line in lines(workload, args.policy or ("elastic-plus", "elastic", "async", "colocate"), seed=args.seed):
        _write(line)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Try configurations and print the best."""
    import msgspec

    from opengyre.simulate.plan import choices, plan

    workload, source, _ = _load(args, accidents=False)
    tried = choices(
        workload,
        policies=args.policy or ("elastic-plus", "async"),
        cells=args.cells,
        slots=args.slots,
        staleness=args.staleness,
        j_max=args.j_max,
    )
    found = plan(
        workload,
        tried,
        objective=args.objective,
        seeds=args.seeds,
        steps=min(args.steps, workload.run.steps),
        source=source,
        on_tried=_progress,
    )
    for planned in found:
        if args.json:
            _write(msgspec.json.encode(planned).decode())
    if not args.json:
        _write(f"{workload.name}: the best of {len(tried)} configurations, by {args.objective} per step")
        _say_host(workload)
        for line in _plan_table(found):
            _write(line)
    return 0


def _say_host(workload: Workload) -> None:
    if workload.host.cores:
        shared = f"host.cores = {workload.host.cores:g}, host.harness_cores = {workload.host.harness_cores:g}"
        _write(f"on one machine: {shared}; for cells with hardware of their own, --set host.cores=0")


def _plan_table(found: list[Planned]) -> list[str]:
    from opengyre.simulate.compare import clock

    head = [
        "J_max",
        "policy",
        "cells",
        "slots",
        "staleness",
        "per step",
        "GPU hours",
        "x best",
        "efficiency",
        "timeouts",
    ]
    rows = [head]
    for p in found:
        c = p.choice
        split = f" ({c.train_cells + 1} train)" if c.policy == "async" else ""
        hours, gpu = _span(p.step_hours, clock), _span(p.gpu_hours, _hours)
        staleness = f"{p.staleness:.1f} of {c.max_staleness}"
        values = [c.j_max or "as is", c.policy + split, str(c.cells), str(c.slots), staleness, hours, gpu]
        values.append(_span(p.ratio, lambda ratio: f"{ratio:.2f}"))
        rows.append([*values, f"{p.efficiency:.1%}", f"{p.timeouts:.1%}"])
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _span(values: tuple[float, float, float], form: Callable[[float], str]) -> str:
    mean, low, high = map(form, values)
    return f"{mean} ({low} to {high})"


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} of {of} simulated" + ("\n" if done >= of else ""))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
