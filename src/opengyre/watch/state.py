"""The present state of a run, folded from its events.

    events ──▶ RunState.apply ──▶ cells · waterlevel · executions · step · trends · rates · ETA

Pure: no clock, no I/O. Unknown kinds and missing fields are ignored, so an older or newer log still folds. A log may
hold several lives of one run (``start``, ``resume``, ``resume`` …): what was in flight when a life ended is forgotten,
what was finished stays and is counted once, and a step done again replaces its first try.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

RATE_WINDOW_S = 60.0  # long enough to hold a few finished executions, short enough to show a role switch
ETA_STEPS = 5  # the last few step times: the pace of a run drifts as the policy writes more


class Phase(StrEnum):
    """What a cell is there for at a moment, whatever its exact state is called."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    SWITCHING = "switching"
    OFF = "off"


_PHASES = {  # any other state of a cell lies between two roles
    **dict.fromkeys(("rollout", "serving"), Phase.ROLLOUT),
    **dict.fromkeys(("train", "training"), Phase.TRAIN),
    **dict.fromkeys(("new", "starting", "loading", "dead", "lost", "failed", "stopped", "retired", "off"), Phase.OFF),
}


def phase_of(state: str) -> Phase:
    """The phase of a CellState value; a state this module does not know lies between two roles."""
    return _PHASES.get(state, Phase.SWITCHING)


@dataclass(slots=True)
class CellView:
    """One cell. ``since``: when it entered its phase; ``load``: share of its slots in use, None if not measured."""

    name: str
    core: bool = False
    state: str = "off"
    phase: Phase = Phase.OFF
    since: float = 0.0
    version: int | None = None
    load: float | None = None


@dataclass(slots=True)
class SwitchStats:
    """Switches of one direction: seconds of those that worked, and how many did not."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def median_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None


class RunState:
    """What is true of a run after the events applied so far."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.t = 0.0
        self.name, self.policy, self.status, self.reason = "run", "", "waiting", ""
        self.planned_steps = 0
        self.seed: int | None = None
        self.learning_rate: float | None = None
        self.lives = 0
        self.cells: dict[str, CellView] = {}
        self.queued = self.running = self.rollout_cells = self.slots = 0
        self.waterlevels: deque[int] = deque(maxlen=600)  # wider than any terminal
        self.in_flight: dict[str, str] = {}  # execution -> state
        self.outcomes: dict[str, tuple[str, str]] = {}  # execution -> (split, outcome)
        self.step, self.version, self.step_started = 0, 0, 0.0
        self.micro: dict[int, dict[int, tuple[str, str]]] = {}  # step -> micro-step -> (state, cell)
        self.steps: dict[int, dict[str, Any]] = {}
        self.evals: list[dict[str, Any]] = []
        self.switches: dict[str, SwitchStats] = {}
        self.notes: deque[tuple[float, str, str]] = deque(maxlen=50)
        self._sampled: deque[tuple[float, int]] = deque()
        self._trained: deque[tuple[float, int]] = deque()
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        """Fold one event."""
        self.t = max(self.t, event.get("t", self.t))
        fold = _FOLDS.get(event.get("kind", ""))
        if fold is not None:
            fold(self, event)

    # -- what follows from it --------------------------------------------------------------------------------------

    @property
    def waterlevel(self) -> int:
        """Executions queued and running."""
        return self.queued + self.running

    @property
    def executions(self) -> Counter[str]:
        """Executions by state; finished ones under their outcome."""
        counts = Counter(self.in_flight.values())
        counts.update(outcome for _, outcome in self.outcomes.values())
        return counts

    @property
    def micro_done(self) -> int:
        """Finished micro-steps of the step in progress."""
        return sum(state in ("done", "pushed") for state, _ in self._micros.values())

    @property
    def micro_total(self) -> int:
        """Micro-steps of the step in progress that were claimed at least once; more may still become claimable."""
        return len(self._micros)

    @property
    def _micros(self) -> dict[int, tuple[str, str]]:
        return self.micro[min(self.micro)] if self.micro else {}

    def micro_by_cell(self) -> Counter[str]:
        """Finished micro-steps of the step in progress, by cell."""
        return Counter(cell for state, cell in self._micros.values() if state in ("done", "pushed"))

    def trend(self, key: str) -> list[float]:
        """A figure of every committed step in order, missing ones left out."""
        rows = (row.get(key) for row in self.steps.values())  # the fold keeps them in order
        return [value for value in rows if value is not None]

    def total(self, key: str) -> int:
        """A count summed over the committed steps, e.g. ``excluded`` or ``degenerate``."""
        return int(sum(self.trend(key)))

    def sampled_per_s(self, now: float | None = None) -> float:
        """Tokens sampled per second: those of the executions that ended in the last window."""
        return self._rate(self._sampled, now)

    def trained_per_s(self, now: float | None = None) -> float:
        """Tokens trained per second over the last window of micro-steps."""
        return self._rate(self._trained, now)

    def _rate(self, marks: deque[tuple[float, int]], now: float | None) -> float:
        end = self.t if now is None else max(now, self.t)
        window = min(RATE_WINDOW_S, end)
        return sum(n for t, n in marks if t > end - RATE_WINDOW_S) / window if window > 0 else 0.0

    def eta_s(self, now: float | None = None) -> float | None:
        """Seconds to the last planned step, from the median of the last step times; None before the first step."""
        times = self.trend("step_s")[-ETA_STEPS:]
        left = self.planned_steps - self.step
        if not times or left <= 0 or self.status != "running":
            return None
        spent = (self.t if now is None else max(now, self.t)) - self.step_started
        pace = median(times)
        return max(0.0, pace - spent) + (left - 1) * pace

    # -- folds, one per kind ---------------------------------------------------------------------------------------

    def _run(self, e: dict[str, Any]) -> None:
        if e.get("state") == "end":
            self.status, self.reason = "ended", e.get("reason") or ""
            self.in_flight.clear()
            return
        self.lives += 1
        self.status, self.reason, self.step_started = "running", "", self.t
        self.name, self.policy = e.get("name") or self.name, e.get("policy") or self.policy
        self.planned_steps = e.get("steps") or self.planned_steps
        self.seed, self.learning_rate = e.get("seed", self.seed), e.get("learning_rate", self.learning_rate)
        self.in_flight.clear()
        self.micro.clear()
        self.queued = self.running = 0
        listed = e.get("cells")
        if listed is not None:
            self.cells = {c["cell"]: CellView(c["cell"], bool(c.get("core")), since=self.t) for c in listed}

    def _cell(self, e: dict[str, Any]) -> None:
        cell = self._of(e)
        cell.state, phase = e.get("state", ""), phase_of(e.get("state", ""))
        if phase is not cell.phase:
            cell.phase, cell.since, cell.load = phase, self.t, None
        if phase in (Phase.ROLLOUT, Phase.TRAIN):
            cell.version = e.get("version", self.version)  # a cell takes a role with the published weights

    def _of(self, e: dict[str, Any]) -> CellView:
        name = e.get("cell", "?")
        return self.cells.setdefault(name, CellView(name, since=self.t))

    def _switch(self, e: dict[str, Any]) -> None:
        stats = self.switches.setdefault(e.get("direction", "?"), SwitchStats())
        if e.get("ok", True):
            stats.seconds.append(e.get("total_s", 0.0))
        else:
            stats.failed += 1

    def _waterlevel(self, e: dict[str, Any]) -> None:
        self.queued, self.running = e.get("queued", 0), e.get("running", 0)
        self.rollout_cells, self.slots = e.get("rollout_cells", 0), e.get("slots", self.slots)
        self.waterlevels.append(self.waterlevel)
        for name, running in (e.get("load") or {}).items():
            if name in self.cells and self.slots:
                self.cells[name].load = running / self.slots

    def _execution(self, e: dict[str, Any]) -> None:
        name, state = e.get("execution", "?"), e.get("state", "")
        if state != "done":
            self.in_flight[name] = state
            return
        self.in_flight.pop(name, None)
        if name not in self.outcomes:
            _mark(self._sampled, self.t, e.get("sampled_tokens") or 0)
        self.outcomes[name] = (e.get("split", "train"), e.get("outcome", "?"))

    def _micro_step(self, e: dict[str, Any]) -> None:
        state, step = e.get("state", ""), e.get("step", 0)
        if state == "claimed" or step in self.micro:  # a late hand-over does not reopen a committed step
            micros, micro, cell = self.micro.setdefault(step, {}), e.get("micro", 0), e.get("cell", "?")
            if state != "requeued" or micros.get(micro, ("", cell))[1] == cell:  # another cell may hold it by now
                micros[micro] = (state, cell)
        if state == "claimed":
            self._of(e).version = self.version
        if state == "done":
            _mark(self._trained, self.t, e.get("tokens") or 0)

    def _step(self, e: dict[str, Any]) -> None:
        self.step, self.version = e.get("step", 0), e.get("version", 0)
        self.step_started = self.t
        while self.steps and next(reversed(self.steps)) > self.step:
            self.steps.popitem()  # a resumed run went back to its checkpoint
        self.steps[self.step] = e
        for closed in [step for step in self.micro if step <= self.step]:
            del self.micro[closed]
        for cell in self.cells.values():
            if cell.core or cell.phase is Phase.ROLLOUT:  # serving cells pull before a step counts as committed
                cell.version = self.version

    def _eval(self, e: dict[str, Any]) -> None:
        self.evals = [*(x for x in self.evals if x.get("version", 0) <= e.get("version", 0)), e]

    def _note(self, e: dict[str, Any]) -> None:
        self.notes.append((self.t, e.get("level", "info"), str(e.get("text", ""))))


def _mark(marks: deque[tuple[float, int]], t: float, tokens: int) -> None:
    marks.append((t, tokens))
    while marks[0][0] <= t - RATE_WINDOW_S:
        marks.popleft()


_FOLDS = {
    "run": RunState._run,
    "cell": RunState._cell,
    "switch": RunState._switch,
    "waterlevel": RunState._waterlevel,
    "execution": RunState._execution,
    "micro_step": RunState._micro_step,
    "step": RunState._step,
    "eval": RunState._eval,
    "note": RunState._note,
}
