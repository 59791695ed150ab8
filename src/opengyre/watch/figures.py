"""The figures of a report: one plain dict, made from the events, small enough to embed in a page.

Times are seconds on the run's clock, shares are 0 to 1. Lists are thinned to the budgets below; counts never are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean, median
from typing import Any

import msgspec

from opengyre.executions.outcome import Outcome
from opengyre.watch import thin
from opengyre.watch.history import Execution, History
from opengyre.watch.verdict import judge, rate_of

# Budgets that keep a page under 3 MB: a row is 20 to 120 bytes.
MAX_SEGMENTS = 12_000  # over all cells
MAX_MICROS = 12_000  # over all cells
MAX_LANES = 128  # more do not fit a screen; shares of time still count all
MAX_WATERLEVEL = 2_400
MAX_EXECUTIONS = 4_000
MAX_STEPS = 600
MAX_SWITCHES = 1_500
MAX_NOTES = 200

OUTCOMES = [o.value for o in Outcome]
STEP_KEYS = [
    *("version", "loss", "grad_norm", "reward_mean", "pass_rate", "executions", "groups", "degenerate", "excluded"),
    *("samples", "tokens", "staleness_max", "ratio_max", "clip_fraction", "seconds", "step_s"),
]


def figures(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Everything a report shows. Works for an empty log and for one that stops anywhere."""
    history = History(events)
    state = history.state
    verdict = judge(state.evals, learning_rate=state.learning_rate, steps=state.step)
    return {
        "run": _run(history),
        "verdict": msgspec.to_builtins(verdict),
        "cells": _cells(history),
        "utilisation": _utilisation(history),
        "waterlevel": [
            [_r(t), queued, running, capacity]
            for t, queued, running, capacity in thin.extremes(history.waterlevel, lambda w: w[1] + w[2], MAX_WATERLEVEL)
        ],
        "steps": [_step(history, k) for k in thin.every(sorted(state.steps), MAX_STEPS)],
        "evals": _evals(history),
        "switches": _switches(history),
        "executions": _executions(history),
        "outcomes": _outcomes(history),
        "totals": _totals(history),
        "notes": [[_r(t), level, text[:500]] for t, level, text in history.notes[-MAX_NOTES:]],
    }


def _run(h: History) -> dict[str, Any]:
    s = h.state
    status = "empty" if not h.kinds else "ended" if h.ended is not None else "stopped"
    return {
        "name": s.name,
        "policy": s.policy,
        "planned_steps": s.planned_steps,
        "seed": s.seed,
        "learning_rate": s.learning_rate,
        "status": status,
        "reason": s.reason,
        "resumes": [_r(t) for t in h.lives[1:]],
        "wall_s": _r(s.t),
        "events": h.kinds.total(),
        "slots": s.slots,
    }


def _cells(h: History) -> list[dict[str, Any]]:
    lanes = thin.every(list(h.lanes.values()), MAX_LANES)
    per_lane = max(1, len(lanes))
    out = []
    for lane in lanes:
        micros = thin.every(lane.micros, max(2, MAX_MICROS // per_lane))
        out.append(
            {
                "cell": lane.cell,
                "core": lane.core,
                "share": {k: round(v, 4) for k, v in h.shares[lane.cell].items()},
                "micro_steps": len(lane.micros),
                "segments": [
                    [_r(s.start), _r(s.stop), s.phase.value, s.state, s.reason[:80]]
                    for s in thin.segments(lane.segments, max(2, MAX_SEGMENTS // per_lane))
                    if s.stop > s.start
                ],
                "micros": [[_r(m.start), _r(m.stop), m.step, m.micro, m.tokens] for m in micros],
            }
        )
    return out


def _utilisation(h: History) -> dict[str, float]:
    shares = list(h.shares.values())
    return {k: round(mean(s[k] for s in shares), 4) for k in shares[0]} if shares else {}


def _step(h: History, k: int) -> dict[str, Any]:
    row = h.state.steps[k]
    out: dict[str, Any] = {"step": k, "t": _r(h.step_times.get(k, row.get("t", 0.0)))}
    out |= {key: _r(row.get(key), 6) for key in STEP_KEYS}
    seconds = row.get("step_s")
    out["tokens_per_s"] = _r(row["tokens"] / seconds, 1) if seconds and row.get("tokens") is not None else None
    return out


def _evals(h: History) -> list[dict[str, Any]]:
    out = []
    for e in h.state.evals:
        rate = rate_of(e)
        if rate is not None:
            out.append({"t": _r(e.get("t", 0.0)), "reward_mean": _r(e.get("reward_mean")), **msgspec.to_builtins(rate)})
    return out


def _switches(h: History) -> dict[str, Any]:
    by_direction: dict[str, dict[str, Any]] = {}
    for direction in sorted({s.get("direction", "?") for s in h.switches}):
        rows = [s for s in h.switches if s.get("direction", "?") == direction]
        good = [s for s in rows if s.get("ok", True)]
        seconds = [s.get("total_s", 0.0) for s in good]
        names = list(dict.fromkeys(name for s in good for name in s.get("phases") or {}))
        by_direction[direction] = {
            "n": len(rows),
            "failed": len(rows) - len(good),
            "median_s": _r(median(seconds)) if seconds else None,
            "max_s": _r(max(seconds)) if seconds else None,
            "moved_calls": sum(s.get("moved_calls") or 0 for s in rows),
            "phases": {n: _r(median((s.get("phases") or {}).get(n, 0.0) for s in good), 4) for n in names},
        }
    rows = thin.every(h.switches, MAX_SWITCHES)
    return {
        "by_direction": by_direction,
        "list": [
            [_r(s.get("t")), s.get("cell", "?"), s.get("direction", "?"), _r(s.get("total_s")), bool(s.get("ok", True))]
            for s in rows
        ],
    }


def _executions(h: History) -> list[list[Any]]:
    rows = []
    for name, x in thin.every(sorted(h.executions.items(), key=lambda item: item[1].start), MAX_EXECUTIONS):
        e = x.done
        outcome = OUTCOMES.index(e["outcome"]) if e.get("outcome") in OUTCOMES else -1
        tokens, held_out = e.get("sampled_tokens") or 0, int(e.get("split") == "held_out")
        where = [name, e.get("task", ""), held_out]
        rows.append(
            [_r(x.start, 2), _r(x.stop - x.start, 2), outcome, _r(e.get("reward")), e.get("calls"), tokens, *where]
        )
    return rows


def _outcomes(h: History) -> list[dict[str, Any]]:
    """A row per outcome that occurred: counts per split, share, mean reward, median seconds."""
    groups: dict[str, list[Execution]] = {}
    for x in h.executions.values():
        groups.setdefault(x.done.get("outcome", "?"), []).append(x)
    order = [*OUTCOMES, *sorted(set(groups) - set(OUTCOMES))]
    out = []
    for outcome in (o for o in order if o in groups):
        rows = groups[outcome]
        splits = Counter(x.done.get("split", "train") for x in rows)
        rewards = [x.done["reward"] for x in rows if x.done.get("reward") is not None]
        out.append(
            {
                "outcome": outcome,
                "scored": len(rewards),
                "train": splits["train"],
                "held_out": splits["held_out"],
                "share": _r(len(rows) / len(h.executions), 4),
                "reward_mean": _r(mean(rewards), 4) if rewards else None,
                "median_s": _r(median(x.stop - x.start for x in rows), 2),
            }
        )
    return out


def _totals(h: History) -> dict[str, Any]:
    done = [x.done for x in h.executions.values()]
    seconds = [x.stop - x.start for x in h.executions.values()]
    cancelled = Outcome.CANCELLED.value  # ended with the run: neither scored nor left out
    excluded = Counter(e.get("outcome", "?") for e in done if e.get("reward") is None)
    del excluded[cancelled]
    sampled = sum(e.get("sampled_tokens") or 0 for e in done)
    use = _utilisation(h)
    return {
        "executions": len(done),
        "cells": len(h.lanes),
        "busy": round(use["rollout"] + use["train"], 4) if use else None,
        "steps": h.state.step,
        "switches": len(h.switches),
        "excluded": dict(excluded),
        "excluded_total": excluded.total(),
        "degenerate": h.state.total("degenerate"),
        "groups": h.state.total("groups"),
        "sampled_tokens": sampled,
        "prompt_tokens": sum(e.get("prompt_tokens") or 0 for e in done),
        "calls": sum(e.get("calls") or 0 for e in done),
        "moves": sum(e.get("moves") or 0 for e in done),
        "sampled_per_s": _r(sampled / h.state.t, 1) if h.state.t > 0 else None,
        "median_execution_s": _r(median(seconds), 2) if seconds else None,
        "longest_execution_s": _r(max(seconds), 2) if seconds else None,
    }


def _r(number: float | None, digits: int = 3) -> float | None:
    """Rounded for the page; what is not a finite number is absent."""
    if number is None or number != number or abs(number) == float("inf"):
        return None
    return round(number, digits)
