"""Figures for other tools: one flat JSON line per step, and a Prometheus snapshot of the present."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from opengyre.watch.state import RunState

_NOT_FIGURES = {"t", "kind", "step", "version"}


class MetricsWriter:
    """A listener that appends to ``metrics.jsonl``: a line per step, and a line per evaluation with ``eval/`` keys.

    Keys are ``step``, ``version``, ``t`` (seconds on the run's clock), ``train/<figure>`` as in the step event,
    ``rollout/...``, ``cells/...`` and ``switch/...``. A resumed run appends; a step that is done again has a second line,
    and the later one counts. A torn last line is cut when the file is reopened.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            data = path.read_bytes()
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        self.state = RunState()
        self._file = path.open("ab", buffering=0)

    def __call__(self, event: dict[str, Any]) -> None:
        """Fold the event; write the line of a step or an evaluation."""
        self.state.apply(event)
        if event.get("kind") == "step":
            self._write(step_line(self.state, event))
        elif event.get("kind") == "eval":
            figures = {f"eval/{k}": v for k, v in event.items() if k not in _NOT_FIGURES}
            self._write(
                {"step": event.get("version", 0), "version": event.get("version", 0), "t": self.state.t, **figures}
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def step_line(s: RunState, event: dict[str, Any]) -> dict[str, Any]:
    """The flat figures of a step that ``s`` has just folded."""
    line: dict[str, Any] = {"step": s.step, "version": s.version, "t": s.t}
    line |= {f"train/{k}": v for k, v in event.items() if k not in _NOT_FIGURES and not isinstance(v, dict | list)}
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
        line |= {f"switch/{name}_count": len(stats.seconds), f"switch/{name}_median_s": stats.median_s}
    return line


def prometheus(s: RunState) -> str:
    """A snapshot in the Prometheus text format (0.0.4); every name starts with ``opengyre_``."""
    out: list[str] = []
    for name, kind, help_text, samples in _families(s):
        rows = [(labels, value) for labels, value in samples if value is not None]
        if rows:
            out += [f"# HELP opengyre_{name} {help_text}", f"# TYPE opengyre_{name} {kind}"]
            out += [f"opengyre_{name}{_labels(labels)} {float(value):.10g}" for labels, value in rows]
    return "\n".join(out) + "\n"


Samples = list[tuple[dict[str, str], float | None]]


def _families(s: RunState) -> Iterator[tuple[str, str, str, Samples]]:
    last = s.steps.get(s.step, {})
    yield "steps_total", "counter", "Optimizer steps committed.", [({}, s.step)]
    yield "steps_planned", "gauge", "Optimizer steps planned.", [({}, s.planned_steps)]
    yield "weights_version", "gauge", "Version of the authoritative weights.", [({}, s.version)]
    yield "run_seconds", "gauge", "Time on the run's clock.", [({}, s.t)]
    yield "eta_seconds", "gauge", "Time to the last planned step.", [({}, s.eta_s())]
    level: Samples = [({"state": "queued"}, s.queued), ({"state": "running"}, s.running)]
    yield "waterlevel", "gauge", "Executions queued and running.", level
    yield "rollout_slots", "gauge", "Slots of the cells in the rollout role.", [({}, s.rollout_cells * s.slots)]
    roles = Counter(c.phase.value for c in s.cells.values())
    yield "cells", "gauge", "Cells by role.", [({"role": k}, n) for k, n in sorted(roles.items())]
    flying = Counter(s.in_flight.values())
    yield (
        "executions",
        "gauge",
        "Executions in flight by state.",
        [({"state": k}, n) for k, n in sorted(flying.items())],
    )
    done = sorted(Counter(s.outcomes.values()).items())
    ended: Samples = [({"split": split, "outcome": outcome}, n) for (split, outcome), n in done]
    yield "executions_total", "counter", "Executions that are over.", ended
    yield (
        "micro_steps",
        "gauge",
        "Micro-steps of the open step.",
        [
            ({"state": "seen"}, s.micro_total),
            ({"state": "done"}, s.micro_done),
        ],
    )
    yield (
        "tokens_per_second",
        "gauge",
        "Tokens over the last minute.",
        [
            ({"kind": "sampled"}, s.sampled_per_s()),
            ({"kind": "trained"}, s.trained_per_s()),
        ],
    )
    excluded = "Executions left out of loss and baseline."
    yield "excluded_total", "counter", excluded, [({}, s.total("excluded"))]
    yield "degenerate_groups_total", "counter", "Groups without variance.", [({}, s.total("degenerate"))]
    switches: Samples = []
    seconds: Samples = []
    for direction, stats in sorted(s.switches.items()):
        switches.append(({"direction": direction, "ok": "true"}, len(stats.seconds)))
        switches.append(({"direction": direction, "ok": "false"}, stats.failed))
        seconds.append(({"direction": direction}, stats.median_s))
    yield "switches_total", "counter", "Role switches.", switches
    yield "switch_seconds_median", "gauge", "Median time of a role switch.", seconds
    for key in (
        "loss",
        "grad_norm",
        "reward_mean",
        "pass_rate",
        "clip_fraction",
        "ratio_max",
        "staleness_max",
        "step_s",
    ):
        name = "step_seconds" if key == "step_s" else f"step_{key}"
        yield name, "gauge", f"{key} of the last step.", [({}, last.get(key))]
    if s.evals:
        yield "held_out_pass_rate", "gauge", "Last held-out pass rate.", [({}, s.evals[-1].get("pass_rate"))]


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{k}="{v.translate(escape)}"' for k, v in labels.items()) + "}"
