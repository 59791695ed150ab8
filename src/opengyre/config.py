"""The resolved run: typed, self-validating, importable without torch.

One struct per table of the TOML file; every field has its meaning and unit beside it. Unknown keys are errors that name
the nearest key. ``--set key.path=value`` goes through the same door as the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from opengyre.errors import ConfigError


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: unknown keys are errors."""


class ModelConfig(_Table, frozen=True, kw_only=True):
    """The policy."""

    path: str = "quickstart"  # a Hugging Face causal-LM folder, or "quickstart" for the shipped policy
    device: str = "auto"  # auto: cuda if there is one, else cpu
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # bf16 on a CPU is slower and noisier
    context: int = 4096  # tokens, prompt + sampled; longer prompts get the dialect's own "too long" error
    format: str | None = None  # how it writes turns: hermes, glm, …; None: found from its chat template


class TasksConfig(_Table, frozen=True, kw_only=True):
    """Where tasks come from."""

    kind: str = "quickstart"  # quickstart | folder | a "module:function" returning a TaskSet
    path: str | None = None  # kind = folder: one sub-folder per task
    train: int = 64  # quickstart: how many training tasks are generated
    held_out: int = 24  # quickstart: how many held-out tasks are generated
    seed: int = 0
    options: dict[str, Any] = {}  # passed to the task set as they are


class HarnessConfig(_Table, frozen=True, kw_only=True):
    """The agent harness. It is run as it is; only its environment and command line are ours."""

    kind: str = "quickstart"  # quickstart | command | claude_code | …: harness/registry.py
    command: list[str] = []  # kind = command; {instruction} {workspace} {home} {base_url} {key} {model} are filled in
    env: dict[str, str] = {}
    options: dict[str, Any] = {}


class SandboxConfig(_Table, frozen=True, kw_only=True):
    """Where an execution lives."""

    kind: Literal["auto", "local", "bubblewrap"] = "auto"  # auto: bubblewrap if it works here, else local
    keep_workspaces: bool = False  # keep each execution's workspace in the run folder


class ExecutionsConfig(_Table, frozen=True, kw_only=True):
    """Limits of one execution. A value here wins over the task's own where it is smaller."""

    agent_deadline_s: float | None = None
    evaluator_deadline_s: float | None = None
    evaluator_retries: int = 1  # further tries after an evaluator failure
    infra_retries: int = 2  # replacements of an execution lost to infrastructure
    max_calls: int = 1000  # model calls per execution; further ones are refused as over budget
    max_running: int | None = None  # None: slots x rollout cells


class SamplingConfig(_Table, frozen=True, kw_only=True):
    """Pins: they win over what the harness asks."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None  # cap on one reply; None: what the harness asks


class ProxyConfig(_Table, frozen=True, kw_only=True):
    """The one door for harnesses."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    keepalive_s: float = 10.0  # longest silence on an open stream; clients show a stall after about 20 s
    stream_tokens: bool = False  # False: a turn is emitted whole


class CellsConfig(_Table, frozen=True, kw_only=True):
    """GPU sets that change role."""

    satellites: int = 2  # besides the one core cell
    slots: int = 16  # executions one rollout cell serves at once at full speed
    kv_tokens: int = 65536  # KV capacity of one cell, tokens
    max_batch: int = 16  # sequences decoded together
    prefill_chunk: int = 512  # tokens of prefill between two decode steps
    pin: bool = False  # pin each cell to one core, round robin
    heartbeat_s: float = 10.0  # rollout cells are asked so often, and replaced if one does not answer for as long
    switch_deadline_s: float = 60.0  # a phase of a role switch not done by then is rolled back
    silence_s: float = 900.0  # a cell that leaves a call unanswered for so long is replaced; checkpoints take a while
    kv_transfer: bool = True  # move KV with preempted calls where versions agree

    def names(self) -> list[tuple[str, bool]]:
        """(name, is the core) of every cell, in the run's order."""
        return [("core", True), *((f"satellite-{n}", False) for n in range(1, self.satellites + 1))]


class ScheduleConfig(_Table, frozen=True, kw_only=True):
    """When cells change role, and how far rollout may run ahead."""

    policy: str = "elastic"  # elastic | elastic-plus | colocate | async | lend | a "module:class"
    max_staleness: int = 1  # version at training - oldest version in the sample
    cooldown_s: float = 2.0  # a cell stays in a role at least this long
    switch_cost_s: float = 0.5  # expected cost of a switch pair, updated from what is measured
    carry_over: bool = False  # colocate: train as soon as a step is full, unfinished executions wait meanwhile
    train_cells: int = 0  # async: satellites that always train; lend: satellites in the pool (besides the core)


class TrainConfig(_Table, frozen=True, kw_only=True):
    """One optimizer step."""

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    loss: Literal["gspo", "grpo", "cispo", "reinforce"] = "gspo"
    clip_low: float = 3e-4  # GSPO, arXiv 2507.18071
    clip_high: float = 4e-4
    old_logprobs: Literal["behaviour", "decoupled"] = "behaviour"  # decoupled: recomputed at step start, with TIS
    tis_cap: float = 2.0  # truncated importance sampling, decoupled only
    kl_weight: float = 0.0  # of a KL term to the model the run starts from; above 0 each cell holds it a second time
    micro_step_tokens: int = 8192  # token budget of a micro-step; longer paths are computed so many tokens at a time
    row_tokens: int = 131072  # an execution's paths are packed up to so many unique tokens where sharing pays
    lease_s: float = 120.0  # a claim not done by then goes to another cell
    flush_every: int = 4  # micro-steps a satellite accumulates before it hands its sum over
    checkpoint_every: int = 1  # steps; a committed step survives a kill only if it was checkpointed
    keep_checkpoints: int = 2


class SamplesConfig(_Table, frozen=True, kw_only=True):
    """From trees to samples."""

    group_size: int = 16
    queries_per_step: int = 4
    j_max: int = 5  # trajectories per execution
    picker: str | None = None  # "module:function" that chooses paths; None: by role priority
    advantage: Literal["mean", "std", "leave_one_out"] = "std"
    min_valid: int = 2  # a group with fewer scored executions gives no gradient
    infra_placeholder: bool = False  # True: lost to infrastructure before its first model call counts as reward 0


class EvalConfig(_Table, frozen=True, kw_only=True):
    """Held-out evaluation, through the same proxy and cells. Never trained on."""

    every: int = 0  # steps; 0: only before the first and after the last step; -1: never
    executions: int = 2  # per held-out task
    temperature: float = 1.0
    pass_threshold: float = 1.0  # an execution passes with at least this reward


class WatchConfig(_Table, frozen=True, kw_only=True):
    """What the user sees."""

    live: Literal["auto", "on", "off"] = "auto"  # auto: live view on a terminal, lines elsewhere
    line_every_s: float = 5.0  # off a terminal: at most one status line per so many seconds
    report: bool = True


class PacedConfig(_Table, frozen=True, kw_only=True):
    """A dry run: real protocol and real state, cells that compute nothing and take their time from a cost model."""

    speed: float = 0.0  # seconds of the modelled cluster in one of ours; 0: a real run
    workload: str | None = None  # a workload (opengyre simulate --list, or a file) whose [cost] is the model's
    cost: dict[str, float] = {}  # values of the cost model (simulate/cost.py) instead of the workload's
    program: str | None = None  # "module:function" making the engine that says what is said; None: filler
    token_scale: float = 1.0  # tokens that the cost model is told of for each of ours
    cell_mtbf_h: float = 0.0  # mean hours of the cluster between two losses of one cell; 0: none by chance
    lost_at_h: dict[str, list[float]] = {}  # cell -> hours of the cluster since the start at which it is lost


class RunConfig(_Table, frozen=True, kw_only=True):
    """A whole training run."""

    run_dir: str = "runs/{name}-{time}"  # {name}: of the config, {time}: start
    name: str = "run"
    seed: int = 0
    steps: int = 12
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    executions: ExecutionsConfig = ExecutionsConfig()
    sampling: SamplingConfig = SamplingConfig()
    proxy: ProxyConfig = ProxyConfig()
    cells: CellsConfig = CellsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    samples: SamplesConfig = SamplesConfig()
    eval: EvalConfig = EvalConfig()
    watch: WatchConfig = WatchConfig()
    paced: PacedConfig = PacedConfig()

    def __post_init__(self) -> None:
        for key, low in _MINIMA.items():
            value = _get(self, key)
            if value is not None and value < low:
                raise ConfigError(f"{value}", where=key, right=f"at least {low}")
        if self.train.clip_low <= 0 or self.train.clip_high <= 0:
            raise ConfigError("clip bounds must be positive", where="train.clip_low, train.clip_high")
        if self.schedule.train_cells >= self.cells.satellites and self.cells.satellites:
            raise ConfigError(
                f"{self.schedule.train_cells} of {self.cells.satellites} satellites always train",
                where="schedule.train_cells",
                right="leave at least one satellite to roll out",
            )
        if self.cells.satellites == 0 and self.schedule.policy != "colocate":
            raise ConfigError(
                f"policy {self.schedule.policy!r} with no satellite leaves nothing to roll out",
                where="cells.satellites",
                right='at least 1, or schedule.policy = "colocate"',
            )
        if self.sampling.top_p != 1.0 or self.sampling.top_k != 0:
            raise ConfigError(
                f"top_p={self.sampling.top_p}, top_k={self.sampling.top_k}",
                where="sampling",
                right="top_p = 1.0 and top_k = 0: a truncated distribution has no usable behaviour log-probability",
            )
        if self.harness.kind == "command" and not self.harness.command:
            raise ConfigError("is empty", where="harness.command", right="the harness's argv")


_MINIMA: dict[str, float] = {
    "steps": 0,
    "cells.satellites": 0,
    "cells.slots": 1,
    "cells.kv_tokens": 256,
    "cells.max_batch": 1,
    "cells.prefill_chunk": 1,
    "model.context": 64,
    "samples.group_size": 1,
    "samples.queries_per_step": 1,
    "samples.j_max": 1,
    "samples.min_valid": 1,
    "schedule.max_staleness": 0,
    "schedule.train_cells": 0,
    "sampling.temperature": 1e-3,
    "train.learning_rate": 0.0,
    "train.micro_step_tokens": 64,
    "train.row_tokens": 64,
    "train.kl_weight": 0.0,
    "train.flush_every": 1,
    "train.checkpoint_every": 1,
    "train.keep_checkpoints": 1,
    "executions.max_calls": 1,
    "paced.speed": 0.0,
    "paced.token_scale": 1e-3,
    "paced.cell_mtbf_h": 0.0,
    "eval.every": -1,
}


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def load(path: Path | None, overrides: list[str]) -> RunConfig:
    """Read a TOML file (None: all defaults), apply ``key.path=value`` overrides, validate.

    Raises:
        ConfigError: unreadable file, unknown key (names the nearest), wrong type or value out of range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError("no such file", where=str(path), right="a TOML config, or quickstart") from None
        except IsADirectoryError:
            raise ConfigError("is a folder", where=str(path), right="a TOML config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(error), where=str(path), right="TOML") from None
    for override in overrides:
        _set(data, override)
    return build(data)


def build(data: dict[str, Any]) -> RunConfig:
    """Validate plain data into a config. Raises ConfigError."""
    _check_keys(data, RunConfig, "")
    try:
        return msgspec.convert(data, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        what, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".")
        value = repr(_value_at(data, key))
        raise ConfigError(value, where=key or "config", right=what[0].lower() + what[1:]) from None


def _value_at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else data
    return data


def _set(data: dict[str, Any], override: str) -> None:
    key, eq, text = override.partition("=")
    if not eq or not key.strip():
        raise ConfigError(f"{override!r}", where="--set", right="key.path=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *tables, last = key.strip().split(".")
    for table in tables:
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{table!r} is not a table", where=f"--set {key}")
    data[last] = value


def _check_keys(data: dict[str, Any], table: type[msgspec.Struct], prefix: str) -> None:
    fields = {f.name: f.type for f in msgspec.structs.fields(table)}
    for key, value in data.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            everywhere = [f"{prefix}{f}" for f in fields]
            right = f"did you mean {prefix}{near[0]}?" if near else "one of " + ", ".join(everywhere)
            raise ConfigError("unknown key", where=f"{prefix}{key}", right=right)
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{value!r}", where=f"{prefix}{key}", right="a table")
            _check_keys(value, kind, f"{prefix}{key}.")


def to_toml(config: RunConfig) -> str:
    """The resolved config as TOML, every key present (``None`` keys are left out as comments)."""
    lines: list[str] = []

    def emit(table: dict[str, Any], name: str) -> None:
        nested = {k: v for k, v in table.items() if isinstance(v, dict)}
        if name:
            lines.append(f"\n[{name}]")
        for key, value in table.items():
            if not isinstance(value, dict):
                lines.append(f"# {key} is not set" if value is None else f"{_key(key)} = {_value(value)}")
        for key, value in nested.items():
            emit(value, f"{name}.{_key(key)}" if name else _key(key))

    emit(msgspec.to_builtins(config), "")
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else msgspec.json.encode(key).decode()


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return msgspec.json.encode(value).decode()  # JSON strings, numbers and booleans are TOML too
