"""Policies side by side on one workload: the same executions for each, rows for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from opengyre.simulate.bound import path_hours
from opengyre.simulate.outcome import Outcome
from opengyre.simulate.recorder import Recorder
from opengyre.simulate.simulator import Simulator
from opengyre.simulate.workload import Drawn, Source, Workload

POLICIES = ("elastic-plus", "elastic", "colocate", "async", "lend")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one workload. ``bound_hours``: what no policy can beat for this work (bound.py)."""

    policy: str
    hours: float
    steps: int
    timeouts: int
    efficiency: float
    bound_hours: float
    outcome: Outcome
    report: str | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON: the fields above, then the other figures of the outcome."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        outcome = data.pop("outcome")
        return {**data, **{key: value for key, value in outcome.items() if key not in data}}


def compare(
    workload: Workload,
    policies: Sequence[str],
    *,
    source: Source | None = None,
    seed: int | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Simulate each policy on the same executions.

    Args:
        workload: what is run.
        policies: names, or ``module:class``.
        source: the executions; None: drawn from the workload with ``seed`` (None: the workload's own).
        folder: where each policy's event log and report go, one run folder each; None: nowhere.
        on_row: called with each row as soon as it is there.

    Raises:
        ConfigError: no such policy.
        SimulationError: a policy under which the run does not end.
    """
    source = source or Drawn(workload, seed)
    path = path_hours(workload, source)
    rows = []
    for policy in policies:
        recorder = Recorder() if folder else None
        outcome = Simulator(workload, source, policy, recorder=recorder, seed=source.seed).run()
        report = recorder.write(folder / policy.replace(":", "-")) if recorder and folder else None
        row = Row(
            policy=policy,
            hours=outcome.hours,
            steps=outcome.steps,
            timeouts=outcome.timeouts,
            efficiency=outcome.efficiency,
            bound_hours=max(path, outcome.work_hours),
            outcome=outcome,
            report=str(report) if report else None,
        )
        rows.append(row)
        on_row(row)
    return rows


COLUMNS = (
    ("policy", "policy"),
    ("hours", "hours"),
    ("x first", "hours over those of the first policy"),
    ("x bound", "hours over the lower bound"),
    ("efficiency", "cell time on taken slots or on training"),
    ("timeouts", "executions that hit their time-out"),
    ("stale", "mean and most versions between admission and training"),
    ("switches", "role switches"),
    ("longest >= 4 h", "queries whose longest execution took 4 h; share of those timed out"),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table for a terminal."""
    cells = [[head for head, _ in COLUMNS]]
    for row in rows:
        o = row.outcome
        cells.append(
            [
                row.policy,
                clock(row.hours),
                f"{row.hours / rows[0].hours:.2f}",
                f"{row.hours / row.bound_hours:.2f}",
                f"{row.efficiency:.1%}",
                f"{row.timeouts} ({row.timeouts / max(1, o.executions):.1%})",
                f"{o.staleness_mean:.2f} / {o.staleness_max}",
                str(o.switches),
                f"{o.long_share:.1%}, {o.long_timeouts:.1%}",
            ]
        )
    widths = [max(len(line[k]) for line in cells) for k in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def clock(hours: float) -> str:
    """Hours, or what is easier to read where they are few."""
    if hours >= 1:
        return f"{hours:.2f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 10 else f"{hours * 3600:.1f} s"
