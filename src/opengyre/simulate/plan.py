"""Which cluster for this workload: configurations tried in the simulator, the best of them with their uncertainty.

    every combination, one seed, few steps ─▶ per J_max the best ones, several seeds ─▶ mean and range, shortest first

A seed is another draw of executions; of a recorded run, its queries drawn anew with replacement. All finalists run the
same draws, so they are compared draw by draw: ``ratio`` says how much more than the best one of its J_max, and where
its range reaches 1 the two are not told apart. What a configuration does to learning - staleness, fewer trajectories -
is not simulated. Fewer trajectories are always faster, so each J_max has its own best; who reads the table decides.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from opengyre.errors import ConfigError
from opengyre.simulate.simulator import SimulationError, Simulator
from opengyre.simulate.workload import Drawn, PolicySettings, Source, Workload

Objective = Literal["time", "gpu-hours"]
_FINALISTS = 6  # enough to see how flat the top is
_FINALISTS_OF_EACH = 3  # where there are several J_max
_FEW_J = 4  # so many J_max are all tried; a recorded run knows dozens


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration. ``train_cells``: satellites that always train (async only); ``j_max``: trajectories per
    execution, a key of the workload's ``training.by_j_max``; None: as it is."""

    policy: str
    cells: int
    slots: int
    max_staleness: int
    train_cells: int = 0
    j_max: str | None = None

    def apply(self, workload: Workload) -> Workload:
        """The workload on this configuration; its executions stay the same. Raises ConfigError."""
        changes: dict[str, Any] = {
            "cluster.cells": self.cells,
            "cluster.slots": self.slots,
            "run.max_staleness": self.max_staleness,
            "executions.reference_slots": workload.executions.reference_slots or workload.cluster.slots,
        }
        own = workload.policies.get(self.policy, PolicySettings())
        changes["policies"] = {
            **msgspec.to_builtins(workload.policies),
            self.policy: {"train_cells": self.train_cells, "carry_over": own.carry_over},
        }
        if self.j_max is not None:
            changes["training.j_max"] = self.j_max
        return workload.change(**changes)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration, tried. Figures per step: mean over seeds, and the lowest and highest."""

    choice: Choice
    seeds: int
    step_hours: tuple[float, float, float]
    gpu_hours: tuple[float, float, float]
    ratio: tuple[float, float, float] = (1.0, 1.0, 1.0)  # to the first of its J_max, draw by draw
    efficiency: float
    staleness: float
    timeouts: float  # share of executions
    by_seed: list[float] = []  # step hours

    def value(self, objective: Objective) -> float:
        """What is to be small."""
        return self.step_hours[0] if objective == "time" else self.gpu_hours[0]


def choices(
    workload: Workload,
    *,
    policies: Sequence[str] = ("elastic-plus", "async"),
    cells: Sequence[int] = (),
    slots: Sequence[int] = (),
    staleness: Sequence[int] = (),
    j_max: Sequence[str] = (),
) -> list[Choice]:
    """All combinations; a list left empty is filled around the workload's own value. Async gets every split.

    Raises:
        ConfigError: a J_max of which nobody knows what it costs.
    """
    here = workload.cluster
    cells = cells or sorted({max(2, here.cells // 2), here.cells, here.cells * 2})
    slots = slots or sorted({max(1, here.slots // 2), here.slots, here.slots * 3 // 2})
    s = workload.run.max_staleness
    staleness = staleness or sorted({max(0, s - 2), s, s + 2})
    out = []
    known = workload.training.by_j_max
    if unknown := [j for j in j_max if j not in known]:
        right = f"one of {', '.join(known)}" if known else "a recorded run, or a workload with [training.by_j_max]"
        raise ConfigError(unknown[0], where="--j-max", right=right)
    for j, policy, n, per_cell, bound in itertools.product(
        j_max or _each_j(workload), policies, cells, slots, staleness
    ):
        splits = range(n - 1) if policy == "async" else [0]
        if n < 2 and policy != "colocate":
            continue
        out += [
            Choice(policy=policy, cells=n, slots=per_cell, max_staleness=bound, train_cells=split, j_max=j)
            for split in splits
        ]
    return out


def _each_j(workload: Workload) -> Sequence[str | None]:
    """The J_max to try: all that are known, of a long table its ends and the workload's own."""
    known, own = list(workload.training.by_j_max), workload.training.j_max
    if len(known) <= _FEW_J:
        return known or [own]
    return list(dict.fromkeys(j for j in (known[0], own, known[-1]) if j is not None))


def plan(
    workload: Workload,
    tried: Sequence[Choice],
    *,
    objective: Objective = "time",
    seeds: int = 5,
    steps: int | None = None,
    source: Callable[[Workload, int], Source] = Drawn,
    on_tried: Callable[[int, int], None] = lambda done, of: None,
) -> list[Planned]:
    """Try configurations; returns the best ones of each J_max, in the order of ``tried``, best first.

    Args:
        workload: what is run.
        tried: from ``choices``.
        objective: hours per step, or GPU hours per step.
        seeds: draws for the finalists.
        steps: how many to simulate; None: the workload's.
        source: makes the executions of a workload and a seed.
        on_tried: called with (simulated so far, of how many).

    Raises:
        ConfigError: nothing to try, or a configuration that cannot be.
    """
    if not tried:
        raise ConfigError("no configuration", where="plan", right="at least 2 cells")
    short = workload.change(**{"run.steps": steps}) if steps else workload
    groups: dict[str | None, list[Choice]] = {}
    for choice in tried:
        groups.setdefault(choice.j_max, []).append(choice)
    most = _FINALISTS if len(groups) == 1 else _FINALISTS_OF_EACH
    total = sum(len(group) + seeds * min(most, len(group)) for group in groups.values())
    done = 0

    def try_(choice: Choice, numbers: Sequence[int]) -> Planned | None:
        nonlocal done
        done += len(numbers)
        on_tried(done, total)
        return _try(short, choice, numbers, source)

    found: list[Planned] = []
    for group in groups.values():
        screened = [p for choice in group if (p := try_(choice, [0])) is not None]
        screened.sort(key=lambda p: p.value(objective))
        finals = [p for one in screened[:most] if (p := try_(one.choice, range(seeds))) is not None]
        finals.sort(key=lambda p: p.value(objective))
        found += [_beside(p, finals[0], objective) for p in finals]
    return found


def _beside(planned: Planned, best: Planned, objective: Objective) -> Planned:
    """With its ratio to the best one."""
    scale = 1.0
    if objective == "gpu-hours":
        scale = planned.gpu_hours[0] / planned.step_hours[0] / (best.gpu_hours[0] / best.step_hours[0])
    ratios = [scale * own / other for own, other in zip(planned.by_seed, best.by_seed, strict=True)]
    return msgspec.structs.replace(planned, ratio=_range(ratios))


def _try(
    workload: Workload, choice: Choice, seeds: Sequence[int], source: Callable[[Workload, int], Source]
) -> Planned | None:
    """Simulate one configuration; None if its run does not end."""
    changed = choice.apply(workload)
    hours, gpu_hours, rest = [], [], []
    gpus = changed.cluster.cells * changed.cluster.nodes_per_cell * changed.cluster.gpus_per_node
    for seed in seeds:
        try:
            outcome = Simulator(changed, source(changed, seed), choice.policy, seed=seed).run()
        except SimulationError:
            return None
        hours.append(outcome.hours / outcome.steps)
        gpu_hours.append(hours[-1] * gpus)
        rest.append((outcome.efficiency, outcome.staleness_mean, outcome.timeouts / max(1, outcome.executions)))
    efficiency, staleness, timeouts = (statistics.fmean(values) for values in zip(*rest, strict=True))
    return Planned(
        choice=choice,
        seeds=len(seeds),
        step_hours=_range(hours),
        gpu_hours=_range(gpu_hours),
        efficiency=efficiency,
        staleness=staleness,
        timeouts=timeouts,
        by_seed=hours,
    )


def _range(values: list[float]) -> tuple[float, float, float]:
    return statistics.fmean(values), min(values), max(values)
