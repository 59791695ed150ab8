"""Workloads: what a run consists of, as a TOML file in which every assumption has a name and a range.

    file ─▶ Workload ─┬─▶ run_config(policy): what policies read        Source.query(n) ─▶ scripts of its executions
                      └─▶ Drawn(seed): scripts drawn from durations

A *duration* is how long an execution takes when all slots of its cell are taken, nothing is held and nothing moves. It
is drawn log-normal; ``within_query`` of its log-variance is shared by the executions of a query, which is what makes
whole groups late. The model's share of it becomes tokens, by the cost model's speed at full slots.
"""

from __future__ import annotations

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from opengyre.config import CellsConfig, RunConfig, SamplesConfig, ScheduleConfig, TrainConfig
from opengyre.errors import ConfigError
from opengyre.simulate.cost import CostModel
from opengyre.simulate.script import Script, Turn


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables: unknown keys are errors."""


class Cluster(_Table, frozen=True, kw_only=True):
    """What runs it."""

    cells: int = 4
    nodes_per_cell: int = 1
    gpus_per_node: int = 8
    slots: int = 16
    cell_mtbf_h: float = 0.0  # mean hours between failures of one cell; 0: never
    lost_at_h: dict[str, list[float]] = {}  # cell -> hours since the start at which it is lost besides


class Host(_Table, frozen=True, kw_only=True):
    """One machine, where cells and harnesses share one: everything takes ``max(1, demand)`` times as long as alone."""

    cores: float = 0.0  # 0: every cell has hardware of its own, and nothing slows it down
    harness_cores: float = 0.0  # what an execution takes of them while no call of it is under way
    call_s: float = 0.0  # what a call takes alone besides its engine: rendering, the wire

    def demand(self, computing: Any, outside: Any) -> Any:
        """Cores that are asked for, over those there are.

        Args:
            computing: cells that decode or train; a number or an array.
            outside: executions that wait for no call, likewise.
        """
        return (computing + self.harness_cores * outside) / self.cores if self.cores else 0.0 * computing


class Run(_Table, frozen=True, kw_only=True):
    """How much, and how far ahead."""

    steps: int = 48
    queries_per_step: int = 16
    group_size: int = 16
    max_staleness: int = 1
    cooldown_s: float = 30.0
    tick_s: float = 10.0  # policies are asked at most so often: a thousandth of a step changes no decision
    give_up_hours: float = 5000.0  # a run that has not ended by then never will


class Executions(_Table, frozen=True, kw_only=True):
    """What an execution takes."""

    median_h: float = 1.0
    sigma: float = 0.7  # of the logarithm
    within_query: float = 0.0  # share of the log-variance that the executions of a query have in common
    model_share: float = 0.7  # of the time that is sampling; the rest is tools
    turns: int = 6  # how finely an execution is simulated: this many stretches of calls, each with its tool time
    timeout_h: float | None = None
    timeout_pauses: bool = False  # True: the time-out's clock stands still while a call is held
    boot_s: float = 30.0
    score_s: float = 60.0
    context: float = 100_000.0  # tokens a sampled token reads, on average
    prompt_per_sampled: float = 1.0  # new prompt tokens (tool results) per sampled one
    reference_slots: int | None = None  # slots per cell at which the durations hold; None: cluster.slots
    abort_share: float = 0.0  # executions lost to infrastructure and replaced, each at a random moment

    @property
    def timeout_s(self) -> float | None:
        """Seconds."""
        return None if self.timeout_h is None else self.timeout_h * 3600


class Training(_Table, frozen=True, kw_only=True):
    """What a group's gradient takes."""

    cell_hours_per_step: float = 1.0  # of a mean step, on one cell, without any waiting
    micro_steps_per_group: int = 8  # of a mean group
    flush_every: int = 4
    micro_step_tokens: float = 0.0  # set where they are known: a recorded run; else from the two above
    by_j_max: dict[str, float] = {}  # J_max -> training work, where ``cell_hours_per_step`` is 1
    j_max: str | None = None  # trajectories per execution, a key of ``by_j_max``; None: as many as make the 1


class PolicySettings(_Table, frozen=True, kw_only=True):
    """What a policy is run with here, where it is not as for the others."""

    train_cells: int = 0
    carry_over: bool = False


class Assumption(_Table, frozen=True, kw_only=True):
    """A value nobody published: ``key`` as in this file, the range in which it is believed, and why."""

    key: str
    low: float
    high: float
    fitted: bool
    why: str


class Published(_Table, frozen=True, kw_only=True):
    """What is to be compared with: hours by policy, or bands of ratios to elastic."""

    hours: dict[str, float] = {}
    ratios: dict[str, tuple[float, float]] = {}
    long_share: float | None = None
    long_timeouts: float | None = None


class Workload(_Table, frozen=True, kw_only=True):
    """One file."""

    name: str
    about: str
    seed: int = 0
    cluster: Cluster = Cluster()
    run: Run = Run()
    executions: Executions = Executions()
    training: Training = Training()
    cost: CostModel = CostModel()
    host: Host = Host()
    policies: dict[str, PolicySettings] = {}
    assumptions: list[Assumption] = []
    published: Published = Published()

    def __post_init__(self) -> None:
        for key, low, high in _RANGES:
            value = _get(self, key)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{value}", where=key, right=f"{low} to {high}")
        j_max, known = self.training.j_max, self.training.by_j_max
        if j_max is not None and j_max not in known:
            right = f"one of {', '.join(known)}" if known else "nothing: there is no [training.by_j_max]"
            raise ConfigError(j_max, where="training.j_max", right=right)

    def run_config(self, policy: str) -> RunConfig:
        """The part of a live run's config that policies read."""
        own = self.policies.get(policy, PolicySettings())
        return RunConfig(
            name=self.name,
            steps=self.run.steps,
            cells=CellsConfig(satellites=self.cluster.cells - 1, slots=self.cluster.slots),
            samples=SamplesConfig(group_size=self.run.group_size, queries_per_step=self.run.queries_per_step),
            schedule=ScheduleConfig(
                policy=policy,
                max_staleness=self.run.max_staleness,
                cooldown_s=self.run.cooldown_s,
                switch_cost_s=self.cost.switch_pair_s,
                train_cells=own.train_cells,
                carry_over=own.carry_over,
            ),
            train=TrainConfig(flush_every=self.training.flush_every),
        )

    @property
    def reference_token_s(self) -> float:
        """Seconds between two tokens of a call when all slots of its cell are taken (``reference_slots`` of them)."""
        e = self.executions
        calls = max(1.0, (e.reference_slots or self.cluster.slots) * e.model_share)
        return self.cost.decode_step_s(calls, calls * e.context) + calls * self.cost.prefill_s(e.prompt_per_sampled)

    @property
    def j_share(self) -> float:
        """Training work with ``training.j_max``, relative to ``training.cell_hours_per_step``."""
        return self.training.by_j_max[self.training.j_max] if self.training.j_max is not None else 1.0

    @property
    def step_tokens(self) -> float:
        """Tokens that training a mean step runs over."""
        return self.training.cell_hours_per_step * 3600 * self.cost.train_tokens_per_s * self.j_share

    @property
    def micro_step_tokens(self) -> float:
        """Tokens of a mean micro-step; the same for every J_max."""
        parts = self.training.micro_steps_per_group * self.run.queries_per_step
        return self.training.micro_step_tokens or self.step_tokens / self.j_share / parts

    def change(self, **values: Any) -> Workload:
        """A copy with values by dotted key, as in ``change(**{"run.max_staleness": 2})``. Raises ConfigError."""
        data = msgspec.to_builtins(self)
        for key, value in values.items():
            *tables, last = key.split(".")
            place = data
            for table in tables:
                place = place.setdefault(table, {}) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise ConfigError("unknown key", where=key, right="a key of a workload file")
            place[last] = value
        return build(data)


_RANGES: list[tuple[str, float, float]] = [
    ("cluster.cells", 1, 100_000),
    ("cluster.slots", 1, 1e6),
    ("host.cores", 0, 1e6),
    ("host.harness_cores", 0, 1e3),
    ("run.steps", 1, 1e6),
    ("run.queries_per_step", 1, 1e6),
    ("run.group_size", 1, 1e4),
    ("run.max_staleness", 0, 1e4),
    ("executions.median_h", 1e-9, 1e4),
    ("executions.sigma", 0, 5),
    ("executions.within_query", 0, 1),
    ("executions.model_share", 0.01, 1),
    ("executions.turns", 1, 10_000),
    ("executions.timeout_h", 1e-9, 1e6),
    ("executions.reference_slots", 1, 1e6),
    ("executions.abort_share", 0, 0.9),
    ("training.micro_steps_per_group", 1, 1e5),
]


def _get(struct: Any, key: str) -> Any:
    for part in key.split("."):
        struct = getattr(struct, part)
    return struct


class Source(Protocol):
    """Where scripts come from."""

    mean_context: float
    seed: int

    def query(self, number: int) -> list[Script]:
        """The executions of the query with this number; the same whenever asked, whatever the policy."""
        ...


class Drawn:
    """Scripts drawn from a workload's distributions, query by query, from one seed."""

    def __init__(self, workload: Workload, seed: int | None = None) -> None:
        self.workload = workload
        self.seed = workload.seed if seed is None else seed
        self.mean_context = workload.executions.context
        self._token_s = workload.reference_token_s

    def query(self, number: int) -> list[Script]:
        """The executions of one query."""
        w, e = self.workload, self.workload.executions
        random = np.random.default_rng((self.seed, number))
        shared = math.sqrt(e.within_query) * random.standard_normal()
        own = math.sqrt(1 - e.within_query) * random.standard_normal(w.run.group_size)
        hours = (e.median_h * np.exp(e.sigma * (shared + own))).tolist()
        aborted = (random.random(w.run.group_size) < e.abort_share).tolist()
        lost = random.random(w.run.group_size).tolist()
        return [self._script(h, h * x if a else 0.0) for h, a, x in zip(hours, aborted, lost, strict=True)]

    def _script(self, hours: float, lost_hours: float) -> Script:
        """``lost_hours``: run before infrastructure lost the execution and it started over."""
        e = self.workload.executions
        stretch_s = hours * 3600 / e.turns
        tokens = stretch_s * e.model_share / self._token_s
        turn = Turn(tokens, tokens * e.prompt_per_sampled, e.context, stretch_s * (1 - e.model_share))
        again = round(lost_hours / hours * e.turns)
        return Script(e.boot_s, (turn,) * (e.turns + again), e.score_s, self.train_tokens(hours))

    def train_tokens(self, hours: float) -> float:
        """Tokens that training runs over, in proportion to what was sampled."""
        w, e = self.workload, self.workload.executions
        mean_h = capped_mean(e.median_h, e.sigma, e.timeout_h)
        return w.step_tokens * hours / mean_h / (w.run.queries_per_step * w.run.group_size)


def capped_mean(median: float, sigma: float, cap: float | None) -> float:
    """Mean of min(X, cap) for a log-normal X: E = m e^(s²/2) Φ((ln(c/m) − s²)/s) + c (1 − Φ(ln(c/m)/s))."""
    if sigma == 0:
        return median if cap is None else min(median, cap)
    if cap is None:
        return median * math.exp(sigma**2 / 2)
    z = math.log(cap / median) / sigma
    return median * math.exp(sigma**2 / 2) * _phi(z - sigma) + cap * (1 - _phi(z))


def _phi(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


# --- files


def shipped() -> dict[str, Path]:
    """The workload files of this package by name."""
    folder = Path(str(resources.files("opengyre.simulate") / "workloads"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_workload(name: str) -> Workload:
    """A shipped workload by name, or a TOML file by path. Raises ConfigError."""
    path = shipped().get(name) or Path(name)
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{name!r}", where="workload", right=f"a file, or one of {', '.join(shipped())}") from None
    except (IsADirectoryError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path), right="a TOML workload file") from None
    return build(data, str(path))


def build(data: dict[str, Any], where: str = "workload") -> Workload:
    """Validate plain data. Raises ConfigError naming the key."""
    try:
        return msgspec.convert(data, Workload)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        what, _, key = str(error).partition(" - at `$.")
        raise ConfigError(what, where=key.rstrip("`") or where, right="see docs/scheduling.md") from None
