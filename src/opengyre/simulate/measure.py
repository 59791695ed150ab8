"""A cost model measured from a recorded run: least squares over what its calls and its micro-steps took.

    calls, micro-steps, executions ─▶ Load: who computes when ─┐
                              what a Host would slow it down ──┴─▶ the seconds each took alone ─▶ its cost per token

On one machine cells and harnesses share cores, and what a token takes depends on who else computes. What it takes alone
does not, so that is what is measured: of a grid of hosts the one is taken under which the seconds are explained best.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from opengyre.simulate.workload import Host

Floats = NDArray[np.float64]
Spans = Sequence[tuple[float, float]]  # start and end, seconds on the run's clock

_CORES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # what cells can share: more cores than cells are found by no slowdown
_HARNESS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # of a core, by an execution that waits for no call
_WORTH = 0.95  # a host that leaves more of the unexplained than this of what no host leaves is chance
_SAMPLE = 20_000  # calls that a host is chosen by; all are fitted then
_LEAST_S = 1e-6


class RecordedCall(NamedTuple):
    """One call: seconds on the run's clock, tokens sampled, prompt tokens that its engine computed, its cell."""

    start: float
    end: float
    tokens: float
    prompt: float
    cell: str


class RecordedMicroStep(NamedTuple):
    """One micro-step: seconds on the run's clock, tokens, its cell."""

    start: float
    end: float
    tokens: float
    cell: str


class Costs(NamedTuple):
    """Measured seconds, of a cell alone: a decode step, more of it for each call, a prompt token, a micro-step, more of
    it for each token; and what slows them down."""

    decode_base_s: float
    decode_call_s: float
    prompt_s: float
    micro_step_s: float
    train_token_s: float
    host: Host


class Load:
    """How many cells compute, and how many executions wait for no call, at each moment of a run.

    Args:
        calls, micro_steps: as recorded.
        executions: from their start until they were scored.
        serving: (moment, whether a cell serves from then on), rising; calls wait while none does.
        pulls: (cell, from, to): it took new weights, and its calls waited.
    """

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        micro_steps: Sequence[RecordedMicroStep],
        executions: Spans,
        serving: Sequence[tuple[float, bool]],
        pulls: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        by_cell: dict[str, list[tuple[float, float]]] = {}
        works: list[RecordedCall | RecordedMicroStep] = [*calls, *micro_steps]
        for one in works:
            by_cell.setdefault(one.cell, []).append((one.start, one.end))
        turns = [t for t, _ in serving]
        all_calls = [(c.start, c.end) for c in calls]
        spans = [t for group in (*by_cell.values(), executions) for span in group for t in span]
        spans += [t for _, *span in pulls for t in span]
        self.pulls = pulls
        self.moments: Floats = np.unique(np.array([*spans, *turns]))
        self.cells = len(by_cell)
        self.computing: Floats = np.zeros(len(self.moments))
        for group in by_cell.values():
            self.computing += self.level(group) > 0
        self.outside: Floats = np.maximum(0.0, self.level(executions) - self.level(all_calls))
        known = np.searchsorted(turns, self.moments, side="right")
        self.serving: Floats = np.array([0.0, *(float(serves) for _, serves in serving)])[known]

    def level(self, spans: Spans) -> Floats:
        """How many spans are open from each moment on."""
        starts, ends = np.sort(np.array(spans, dtype=np.float64).reshape(-1, 2), axis=0).T
        opened, closed = (np.searchsorted(edges, self.moments, side="right") for edges in (starts, ends))
        return (opened - closed).astype(np.float64)

    def slowdown(self, host: Host) -> Floats:
        """From each moment on."""
        slowdown: Floats = np.maximum(1.0, host.demand(self.computing, self.outside))
        return slowdown

    def area(self, level: Floats, start: Floats, end: Floats) -> Floats:
        """The integral of a level from each start to its end."""
        so_far = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self.moments))])
        area: Floats = np.interp(end, self.moments, so_far) - np.interp(start, self.moments, so_far)
        return area

    def alone_s(self, host: Host, start: float, end: float) -> float:
        """What would have been done by a cell alone in so many seconds."""
        return float(self.area(1 / self.slowdown(host), np.array([start]), np.array([end]))[0])


def costs(calls: Sequence[RecordedCall], micro_steps: Sequence[RecordedMicroStep], load: Load) -> Costs:
    """Fit the costs, on the host that explains most.

    Of a call: ``slowdown (fixed + tokens (base + per call x calls beside it) + per token x prompts that its cell took
    in meanwhile, its own among them)``, as serving.py has it; the fixed part is rendering and the wire. Of a
    micro-step: ``slowdown (fixed + tokens x per token)``. What a call waits while no cell serves is not counted.
    """
    decoding, training = _Decoding(calls, load), _Training(micro_steps, load)
    some = decoding.some(_SAMPLE)
    none = Host()
    scores = {host: some.unexplained(host) + training.unexplained(host) for host in [none, *_hosts(load.cells)]}
    best = min(scores, key=lambda host: scores[host])
    host = best if scores[best] < _WORTH * scores[none] else none
    call_s, base_s, batch_s, prompt_s = decoding.fit(host)[0]
    fixed_s, token_s = training.fit(host)[0]
    return Costs(base_s, batch_s, prompt_s, fixed_s, token_s, msgspec.structs.replace(host, call_s=call_s))


def _hosts(cells: int) -> Iterable[Host]:
    """Hosts that would slow so many cells down."""
    return (
        Host(cores=cores, harness_cores=harness) for cores in _CORES for harness in _HARNESS if cores < cells or harness
    )


class _Fit:
    """Least squares of seconds over columns that a host stretches."""

    columns: Floats
    start: Floats
    end: Floats

    def __init__(self, load: Load) -> None:
        self.load = load

    def area(self, level: Floats) -> Floats:
        """The integral of a level over the time that counts."""
        return self.load.area(level, self.start, self.end)

    def fit(self, host: Host) -> tuple[list[float], float]:
        """Coefficients of at least 0, and the sum of squares that they leave."""
        seconds = self.area(np.ones_like(self.load.moments))
        alone = self.area(1 / self.load.slowdown(host))
        stretched = self.columns * (seconds / np.maximum(_LEAST_S, alone))[:, None]
        found = non_negative(stretched, seconds)
        return found, float(np.sum((seconds - stretched @ found) ** 2))

    def unexplained(self, host: Host) -> float:
        """The share of the variance that is left."""
        seconds = self.area(np.ones_like(self.load.moments))
        return self.fit(host)[1] / max(_LEAST_S, float(np.sum((seconds - seconds.mean()) ** 2)))


class _Decoding(_Fit):
    """Of calls."""

    def __init__(self, calls: Sequence[RecordedCall], load: Load) -> None:
        super().__init__(load)
        self.cells = np.array([c.cell for c in calls])
        self.start, self.end, tokens, prompt = np.array([c[:4] for c in calls], dtype=np.float64).T
        self._pulls: dict[str, list[tuple[float, float]]] = {}
        for cell, began, ended in load.pulls:
            self._pulls.setdefault(cell, []).append((began, ended))
        beside, taken_in = np.zeros(len(calls)), np.zeros(len(calls))
        counted = np.maximum(_LEAST_S, self.area(np.ones_like(load.moments)))
        for cell in np.unique(self.cells):
            at = np.flatnonzero(self.cells == cell)
            s, e = self.start[at], self.end[at]
            beside[at] = (self.area(load.level(list(zip(s, e, strict=True)))) / counted)[at]
            order = np.argsort(s)
            so_far = np.concatenate([[0.0], np.cumsum(prompt[at][order])])
            first, last = np.searchsorted(s[order], s, side="left"), np.searchsorted(s[order], e, side="right")
            taken_in[at] = so_far[last] - so_far[first]
        self.columns = np.stack([np.ones(len(calls)), tokens, tokens * beside, taken_in], axis=1)

    def area(self, level: Floats) -> Floats:
        """A call waits while all cells train, and while its own takes new weights."""
        level = level * self.load.serving
        area = super().area(level)
        for cell, pulls in self._pulls.items():
            area -= (self.cells == cell) * super().area(level * self.load.level(pulls))
        return area

    def some(self, count: int) -> _Decoding:
        """At most so many of them, evenly."""
        every, out = -(-len(self.start) // count), copy.copy(self)
        out.start, out.end = self.start[::every], self.end[::every]
        out.columns, out.cells = self.columns[::every], self.cells[::every]
        return out


class _Training(_Fit):
    """Of micro-steps."""

    def __init__(self, micro_steps: Sequence[RecordedMicroStep], load: Load) -> None:
        super().__init__(load)
        self.start, self.end, tokens = np.array([m[:3] for m in micro_steps], dtype=np.float64).reshape(-1, 3).T
        self.columns = np.stack([np.ones(len(micro_steps)), tokens], axis=1)


def non_negative(columns: Floats, target: Floats) -> list[float]:
    """Least squares with coefficients of at least 0: columns that would get less are left out, worst first."""
    used: list[int] = list(range(columns.shape[1]))
    while used:
        found, *_ = np.linalg.lstsq(columns[:, used], target, rcond=None)
        if (found >= 0).all():
            out = [0.0] * columns.shape[1]
            for place, value in zip(used, found.tolist(), strict=True):
                out[place] = value
            return out
        used.pop(int(np.argmin(found)))
    return [0.0] * columns.shape[1]
