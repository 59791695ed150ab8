"""Figures for other tools: one flat JSON line per step, and a Prometheus snapshot of the present."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from opengyre.watch.state import RunState

_STEP_GAUGES = (
    "loss",
    "grad_norm",
    "reward_mean",
    "pass_rate",
    "clip_fraction",
    "ratio_max",
    "staleness_max",
    "step_s",
)
_NOT_FIGURES = {"t", "kind", "step", "version"}


class MetricsWriter:
    """A listener that appends to ``metrics.jsonl``: a line per step, and a line per evaluation with ``eval/`` keys.

    Keys are ``step``, ``version``, ``t`` (seconds on the run's clock), ``train/<figure>`` as in the step event,
    ``rollout/...``, ``cells/...`` and ``switch/...``. A resumed run appends; a step done again has a second line, and
    the later one counts. A torn last line is cut when the file is reopened; ``past`` are the events of earlier lives.
    """

    def __init__(self, path: Path, past: Iterable[dict[str, Any]] = ()) -> None:
        if path.exists():
            data = path.read_bytes()
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        self.state = RunState(past)
        self._file = path.open("ab", buffering=0)

    def __call__(self, event: dict[str, Any]) -> None:
        """Fold the event; write the line of a step or an evaluation."""
        self.state.apply(event)
        if event.get("kind") == "step":
            self._write(step_line(self.state, event))
        elif event.get("kind") == "eval":
            figures = {f"eval/{k}": v for k, v in event.items() if k not in _NOT_FIGURES}
            self._write({"step": self.state.step, "version": event.get("version", 0), "t": self.state.t, **figures})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def step_line(s: RunState, event: dict[str, Any]) -> dict[str, Any]:
    """The flat figures of a step that ``s`` has just folded."""
    line: dict[str, Any] = {"step": s.step, "version": s.version, "t": s.t}
    line |= {f"train/{k}": v for k, v in event.items() if k not in _NOT_FIGURES and isinstance(v, int | float)}
    line |= {
        "rollout/sampled_tokens_per_s": round(s.sampled_per_s(), 3),
        "train/trained_tokens_per_s": round(s.trained_per_s(), 3),
        "rollout/queued": s.queued,
        "rollout/running": s.running,
    }
    line |= {f"executions/{k}": n for k, n in s.executions.items()}
    line |= {f"cells/{k}": n for k, n in Counter(c.phase.value for c in s.cells.values()).items()}
    for direction, stats in s.switches.items():
        name = direction.replace(">", "_to_")
        line[f"switch/{name}_count"] = len(stats.seconds)
        if stats.median_s is not None:
            line[f"switch/{name}_median_s"] = stats.median_s
    return line


def prometheus(s: RunState) -> str:
    """A snapshot in the Prometheus text format (0.0.4); every name starts with ``opengyre_``."""
    out: list[str] = []
    for name, meaning, samples in [*_run_figures(s), *_flow_figures(s), *_switch_figures(s)]:
        rows = [(labels, value) for labels, value in samples if value is not None]
        if rows:
            kind = "counter" if name.endswith("_total") else "gauge"
            out += [f"# HELP opengyre_{name} {meaning}", f"# TYPE opengyre_{name} {kind}"]
            out += [f"opengyre_{name}{_labels(labels)} {float(value):.10g}" for labels, value in rows]
    return "\n".join(out) + "\n"


Family = tuple[str, str, list[tuple[dict[str, str], float | None]]]  # name, meaning, (labels, value)


def _one(name: str, meaning: str, value: float | None) -> Family:
    return name, meaning, [({}, value)]


def _by(name: str, meaning: str, label: str, values: Mapping[str, float | None]) -> Family:
    return name, meaning, [({label: key}, value) for key, value in sorted(values.items())]


def _run_figures(s: RunState) -> Iterator[Family]:
    last = s.steps.get(s.step, {})
    yield _one("steps_total", "Optimizer steps committed.", s.step)
    yield _one("steps_planned", "Optimizer steps planned.", s.planned_steps)
    yield _one("weights_version", "Version of the authoritative weights.", s.version)
    yield _one("run_seconds", "Time on the run's clock.", s.t)
    yield _one("eta_seconds", "Time to the last planned step.", s.eta_s())
    yield _one("excluded_total", "Executions left out of loss and baseline.", s.total("excluded"))
    yield _one("degenerate_groups_total", "Groups without variance in their rewards.", s.total("degenerate"))
    for key in _STEP_GAUGES:
        yield _one("step_seconds" if key == "step_s" else f"step_{key}", f"{key} of the last step.", last.get(key))
    if s.evals:
        yield _one("held_out_pass_rate", "Last held-out pass rate.", s.evals[-1].get("pass_rate"))


def _flow_figures(s: RunState) -> Iterator[Family]:
    yield _by("waterlevel", "Executions in the system.", "state", {"queued": s.queued, "running": s.running})
    yield _one("rollout_slots", "Slots of the cells in the rollout role.", s.rollout_cells * s.slots)
    yield _by("executions", "Executions in flight.", "state", Counter(s.in_flight.values()))
    done = sorted(Counter(s.outcomes.values()).items())
    samples: list[tuple[dict[str, str], float | None]] = [
        ({"split": split, "outcome": outcome}, n) for (split, outcome), n in done
    ]
    yield "executions_total", "Executions that are over.", samples
    micros = {"seen": s.micro_total, "done": s.micro_done}
    yield _by("micro_steps", "Micro-steps of the step in progress.", "state", micros)
    rates = {"sampled": s.sampled_per_s(), "trained": s.trained_per_s()}
    yield _by("tokens_per_second", "Tokens over the last minute.", "kind", rates)


def _switch_figures(s: RunState) -> Iterator[Family]:
    yield _by("cells", "Cells by role.", "role", Counter(c.phase.value for c in s.cells.values()))
    good = {name: len(stats.seconds) for name, stats in s.switches.items()}
    yield _by("switches_total", "Role switches that worked.", "direction", good)
    failed = {name: stats.failed for name, stats in s.switches.items()}
    yield _by("switches_failed_total", "Role switches that did not.", "direction", failed)
    medians = {name: stats.median_s for name, stats in s.switches.items()}
    yield _by("switch_seconds_median", "Median time of a role switch.", "direction", medians)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{k}="{v.translate(escape)}"' for k, v in labels.items()) + "}"
