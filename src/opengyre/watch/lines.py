"""The view for logs and pipes: plain ASCII lines, one per step, switch and evaluation, a status line now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from opengyre.watch import text
from opengyre.watch.state import Phase, RunState
from opengyre.watch.verdict import rate_of

STAMP_WIDTH = 8  # holds "23h 59m"


class LineView:
    """Writes lines to ``stream``. A reader that went away (closed pipe) ends the output, never the run.

    Args:
        line_every_s: a status line comes when nothing was written for so many seconds of the run's clock.
        past: events of the run's earlier lives; known, not shown.
    """

    def __init__(self, stream: TextIO, *, line_every_s: float, past: Iterable[dict[str, Any]] = ()) -> None:
        self.state = RunState(past)
        self._stream, self._every = stream, line_every_s
        self._last = self.state.t
        self._gone = False

    def __call__(self, event: dict[str, Any]) -> None:
        """Fold the event; write what it is worth."""
        self.state.apply(event)
        words = _WORDS.get(event.get("kind", ""))
        line = words(self.state, event) if words else None
        if line:
            self._write(line)
        elif self.state.status == "running" and self.state.t - self._last >= self._every:
            self._write(status(self.state))

    def close(self) -> None:
        """Nothing is held; the stream stays open, it is the caller's."""

    def _write(self, line: str) -> None:
        self._last = self.state.t
        if self._gone:
            return
        try:
            self._stream.write(f"[{text.duration(self.state.t):>{STAMP_WIDTH}}] {ascii_only(line)}\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed file
            self._gone = True


def ascii_only(line: str) -> str:
    """One line that any terminal encoding can carry."""
    return text.plain(line).encode("ascii", "replace").decode()


def status(s: RunState) -> str:
    """Where the run is, in one line."""
    roles = [f"{n} {phase.value}" for phase in Phase if (n := sum(c.phase is phase for c in s.cells.values()))]
    parts = [
        f"step {s.step}/{s.planned_steps}",
        f"waterlevel {s.waterlevel} ({s.queued} queued, {s.running} running)",
        "cells " + (", ".join(roles) or "none"),
    ]
    if s.micro_total:
        parts.append(f"micro-steps {s.micro_done} of {s.micro_total} so far")
    parts.append(f"{text.count(s.sampled_per_s())} tok/s sampled")
    if s.trained_per_s():
        parts.append(f"{text.count(s.trained_per_s())} tok/s trained")
    return ", ".join(parts)


def _run(s: RunState, e: dict[str, Any]) -> str:
    if e.get("state") == "end":
        done = f"{text.plural(s.step, 'step')}, {text.plural(len(s.outcomes), 'execution')}"
        reason = f" ({e['reason']})" if e.get("reason") else ""
        return f"run end{reason}: {done}, {text.duration(s.t)}"
    cores = sum(c.core for c in s.cells.values())
    cells = f"{text.plural(len(s.cells), 'cell')} ({cores} core)"
    rate = "" if s.learning_rate is None else f", learning rate {s.learning_rate:g}"
    return f"run {e.get('state')}: {s.name}, policy {s.policy}, {s.planned_steps} steps, {cells}{rate}"


def _step(s: RunState, e: dict[str, Any]) -> str:
    parts = [
        f"step {s.step}/{s.planned_steps}",
        f"version {s.version}",
        f"pass {text.percent(e.get('pass_rate'))}",
        f"reward {text.figure(e.get('reward_mean'))}",
        f"loss {text.figure(e.get('loss'))}",
        f"grad {text.figure(e.get('grad_norm'))}",
        f"clip {text.percent(e.get('clip_fraction'))}",
        f"{e.get('executions', '-')} executions",
    ]
    if e.get("excluded"):
        parts.append(f"{e['excluded']} excluded")
    if e.get("degenerate"):
        parts.append(f"{e['degenerate']}/{e.get('groups', '-')} groups without variance")
    parts.append(f"took {text.duration(e.get('step_s'))}")
    if s.eta_s() is not None:
        parts.append(f"ETA {text.duration(s.eta_s())}")
    return ", ".join(parts)


def _switch(_: RunState, e: dict[str, Any]) -> str:
    direction = str(e.get("direction", "?")).replace(">", " -> ")
    phases = ", ".join(f"{k.removesuffix('_s')} {text.duration(v)}" for k, v in (e.get("phases") or {}).items())
    moved = f", {text.plural(e['moved_calls'], 'call')} moved" if e.get("moved_calls") else ""
    failed = "" if e.get("ok", True) else " FAILED"
    detail = f" ({phases})" if phases else ""
    return f"switch {e.get('cell', '?')} {direction}{failed} in {text.duration(e.get('total_s'))}{detail}{moved}"


def _eval(_: RunState, e: dict[str, Any]) -> str:
    rate = rate_of(e)
    if rate is None:
        return f"evaluation of version {e.get('version', '?')}: nothing was scored"
    spread = f"95 %: {100 * rate.low:.0f} to {100 * rate.high:.0f} %"
    passed = f"{rate.passes}/{rate.n} passed = {text.percent(rate.rate)} ({spread})"
    return f"evaluation of version {rate.version}: {passed}, reward {text.figure(e.get('reward_mean'))}"


def _note(_: RunState, e: dict[str, Any]) -> str | None:
    level = e.get("level", "info")
    return None if level == "info" else f"{level}: {e.get('text', '')}"


_WORDS = {"run": _run, "step": _step, "switch": _switch, "eval": _eval, "note": _note}
