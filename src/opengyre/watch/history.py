"""Everything the report shows, folded from the events: what each cell did when, and every series over time.

    events ──▶ History.apply ──▶ segments per cell ─┐
                     │                              ├──▶ shares of time, lanes
                     ├──▶ micro-step intervals ─────┘
                     └──▶ waterlevel · steps · evals · switches · executions · notes

Intervals are (start_s, stop_s) on the run's clock. Pure; memory grows with the events, the report thins it out later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opengyre.watch.state import Phase, RunState, phase_of

Interval = tuple[float, float]


@dataclass(slots=True)
class Segment:
    """A stretch of time in one phase."""

    start: float
    stop: float
    phase: Phase
    state: str
    reason: str = ""


@dataclass(slots=True)
class Micro:
    """One finished micro-step."""

    start: float
    stop: float
    step: int
    micro: int
    tokens: int


@dataclass(slots=True)
class Lane:
    """One cell through the run."""

    cell: str
    core: bool = False
    segments: list[Segment] = field(default_factory=list)
    micros: list[Micro] = field(default_factory=list)

    def enter(self, t: float, phase: Phase, state: str, reason: str = "") -> None:
        """The cell is in ``state`` from ``t`` on; the same state again goes on with its segment."""
        if self.segments:
            last = self.segments[-1]
            if last.state == state:
                return
            last.stop = t
        self.segments.append(Segment(t, t, phase, state, reason))

    def carve(self, start: float, stop: float, state: str) -> None:
        """Mark [start, stop] as switching, unless the cell's own states already say so."""
        if not self.segments:
            return
        self.segments[-1].stop = max(self.segments[-1].stop, stop)
        first = len(self.segments) - 1
        while first > 0 and self.segments[first - 1].stop > start:
            first -= 1
        tail = self.segments[first:]
        if any(s.phase is Phase.SWITCHING for s in tail):
            return
        del self.segments[first:]
        for s in tail:
            if s.start < start:
                self.segments.append(Segment(s.start, min(s.stop, start), s.phase, s.state, s.reason))
        self.segments.append(Segment(max(start, tail[0].start), stop, Phase.SWITCHING, state))
        last = tail[-1]
        self.segments.append(Segment(stop, last.stop, last.phase, last.state, last.reason))


@dataclass(slots=True)
class Execution:
    """One execution; ``start`` is when it began to run, ``stop`` when it was over."""

    start: float
    stop: float
    done: dict[str, Any]


class History:
    """A run as it went. ``state`` is what it came to."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.state = RunState()
        self.lanes: dict[str, Lane] = {}
        self.lives: list[float] = []
        self.ended: float | None = None
        self.waterlevel: list[tuple[float, int, int, int]] = []  # t, queued, running, capacity
        self.switches: list[dict[str, Any]] = []
        self.executions: dict[str, Execution] = {}
        self.step_times: dict[int, float] = {}
        self.notes: list[tuple[float, str, str]] = []
        self.kinds: Counter[str] = Counter()
        self.shares: dict[str, dict[str, float]] = {}  # cell -> share of its time by phase, see ``_shares``
        self._began: dict[str, float] = {}
        self._claims: dict[tuple[int, int], tuple[float, str]] = {}
        for event in events:
            self.apply(event)
        self._close()

    def apply(self, e: dict[str, Any]) -> None:
        """Fold one event."""
        self.state.apply(e)
        self.kinds[e.get("kind", "")] += 1
        fold = _FOLDS.get(e.get("kind", ""))
        if fold is not None:
            fold(self, self.state.t, e)

    def _close(self) -> None:
        for lane in self.lanes.values():
            if lane.segments:
                lane.segments[-1].stop = max(lane.segments[-1].stop, self.state.t)
        serving = self._serving()
        self.shares = {lane.cell: _shares(lane, serving) for lane in self.lanes.values()}

    def _serving(self) -> list[Interval]:
        """When at least one execution ran; always, if the waterlevel was never measured (unknown is not idle)."""
        if not self.waterlevel:
            return [(0.0, self.state.t)]
        stops = [t for t, *_ in self.waterlevel[1:]] + [self.state.t]
        return _union([(w[0], stop) for w, stop in zip(self.waterlevel, stops, strict=True) if w[2] > 0])

    # -- folds -----------------------------------------------------------------------------------------------------

    def _run(self, t: float, e: dict[str, Any]) -> None:
        if e.get("state") == "end":
            self.ended = t
            return
        self.ended = None
        self.lives.append(t)
        self._claims.clear()
        for cell in e.get("cells") or ():
            self._lane(cell["cell"]).core = bool(cell.get("core"))
        for lane in self.lanes.values():
            lane.enter(t, Phase.OFF, "off", "not started yet")

    def _lane(self, name: str) -> Lane:
        return self.lanes.setdefault(name, Lane(name))

    def _cell(self, t: float, e: dict[str, Any]) -> None:
        state = e.get("state", "")
        self._lane(e.get("cell", "?")).enter(t, phase_of(state), state, str(e.get("reason") or ""))

    def _switch(self, t: float, e: dict[str, Any]) -> None:
        self.switches.append(e)
        self._lane(e.get("cell", "?")).carve(t - e.get("total_s", 0.0), t, e.get("direction", "switch"))

    def _waterlevel(self, t: float, e: dict[str, Any]) -> None:
        capacity = e.get("rollout_cells", 0) * e.get("slots", 0)
        self.waterlevel.append((t, e.get("queued", 0), e.get("running", 0), capacity))

    def _execution(self, t: float, e: dict[str, Any]) -> None:
        name, state = e.get("execution", "?"), e.get("state")
        if state == "running":
            self._began[name] = t
        elif state == "done":
            agent_s = e.get("agent_s") or 0.0
            self.executions[name] = Execution(self._began.pop(name, t - agent_s), t, e)

    def _micro_step(self, t: float, e: dict[str, Any]) -> None:
        key, state = (e.get("step", 0), e.get("micro", 0)), e.get("state")
        if state == "claimed":
            self._claims[key] = (t, e.get("cell", "?"))
        elif state == "done" or (state == "requeued" and e.get("seconds")):  # computed in vain is no idleness either
            cell, began = e.get("cell", "?"), t - (e.get("seconds") or 0.0)
            claimed = self._claims.get(key)
            if claimed is not None and claimed[1] == cell:
                began = claimed[0]
                del self._claims[key]
            self._lane(cell).micros.append(Micro(began, t, *key, e.get("tokens") or 0))

    def _step(self, t: float, e: dict[str, Any]) -> None:
        self.step_times[e.get("step", 0)] = t

    def _note(self, t: float, e: dict[str, Any]) -> None:
        self.notes.append((t, e.get("level", "info"), str(e.get("text", ""))))


_FOLDS = {
    "run": History._run,
    "cell": History._cell,
    "switch": History._switch,
    "waterlevel": History._waterlevel,
    "execution": History._execution,
    "micro_step": History._micro_step,
    "step": History._step,
    "note": History._note,
}


def _shares(lane: Lane, serving: list[Interval]) -> dict[str, float]:
    """Shares of a cell's time: rollout, train, switching, idle and off; they sum to 1 (all 0 for a cell never seen).

    Idle is time in the rollout role while nothing runs, and time in the training role without a micro-step.
    """
    busy = {Phase.ROLLOUT: serving, Phase.TRAIN: _union([(m.start, m.stop) for m in lane.micros])}
    seconds = dict.fromkeys(("rollout", "train", "switching", "idle", "off"), 0.0)
    for phase in Phase:
        spans = [(s.start, s.stop) for s in lane.segments if s.phase is phase]
        whole = sum(b - a for a, b in spans)
        used = _overlap(_union(spans), busy[phase]) if phase in busy else whole
        seconds[phase.value] += used
        seconds["idle"] += whole - used
    total = sum(seconds.values())
    return {k: v / total if total > 0 else 0.0 for k, v in seconds.items()}


def _union(intervals: list[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time, in order."""
    out: list[Interval] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        elif b > a:
            out.append((a, b))
    return out


def _overlap(left: list[Interval], right: list[Interval]) -> float:
    """Seconds covered by both; each side disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
