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


class Moments:
    """Levels that change at given moments only, each as its values from every moment on."""

    def __init__(self, *edges: Sequence[float] | Floats) -> None:
        self.at: Floats = np.unique(np.concatenate([np.asarray(e, dtype=np.float64) for e in edges]))

    def level(self, spans: Floats) -> Floats:
        """How many of the spans, shape (n, 2), are open."""
        starts, ends = np.sort(spans, axis=0).T
        opened, closed = (np.searchsorted(edges, self.at, side="right") for edges in (starts, ends))
        return (opened - closed).astype(np.float64)

    def steps(self, values: Sequence[tuple[float, bool]]) -> Floats:
        """A level that is given by (moment, whether from then on), rising; 0 before."""
        known = np.searchsorted([t for t, _ in values], self.at, side="right")
        level: Floats = np.array([0.0, *(float(value) for _, value in values)])[known]
        return level

    def area(self, level: Floats, start: Floats | float, end: Floats | float) -> Floats:
        """The integral of a level from each start to its end."""
        so_far = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self.at))])
        area: Floats = np.interp(end, self.at, so_far) - np.interp(start, self.at, so_far)
        return area


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
        executions: Sequence[tuple[float, float]],
        serving: Sequence[tuple[float, bool]],
        pulls: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        by_cell: dict[str, list[tuple[float, float]]] = {}
        works: list[RecordedCall | RecordedMicroStep] = [*calls, *micro_steps]
        for one in works:
            by_cell.setdefault(one.cell, []).append((one.start, one.end))
        busy = np.concatenate([_union(_spans(group)) for group in by_cell.values()])
        asking, running = _spans([(c.start, c.end) for c in calls]), _spans(executions)
        self.changes = serving
        self.pulls: dict[str, list[tuple[float, float]]] = {}
        for cell, began, ended in pulls:
            self.pulls.setdefault(cell, []).append((began, ended))
        turns = [t for t, _ in serving]
        self.moments = Moments(busy.ravel(), asking.ravel(), running.ravel(), turns)
        self.cells = len(by_cell)
        self.computing = self.moments.level(busy)
        self.outside: Floats = np.maximum(0.0, self.moments.level(running) - self.moments.level(asking))
        self.serving = self.moments.steps(serving)

    def speed(self, host: Host) -> Floats:
        """What is done in a second, of what a cell alone would do."""
        speed: Floats = 1 / np.maximum(1.0, host.demand(self.computing, self.outside))
        return speed

    def alone_s(self, host: Host, start: Floats | float, end: Floats | float) -> Floats:
        """In how many seconds a cell alone does what is done from each start to its end."""
        return self.moments.area(self.speed(host), start, end)


def _spans(pairs: Sequence[tuple[float, float]]) -> Floats:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _union(spans: Floats) -> Floats:
    """The same time in spans that do not overlap."""
    spans = spans[np.argsort(spans[:, 0])]
    so_far = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > so_far[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], so_far[last]], axis=1)


def costs(calls: Sequence[RecordedCall], micro_steps: Sequence[RecordedMicroStep], load: Load) -> Costs:
    """Fit the costs, on the host that explains most. There must be a call and a micro-step.

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
    """Least squares of seconds over columns that a host stretches.

    ``seconds``: of each, that count; ``share``: that these are of those in which it could have gone on by ``level``.
    """

    load: Load
    start: Floats
    end: Floats
    columns: Floats
    seconds: Floats
    share: Floats

    def level(self) -> Floats:
        """1 where it can go on."""
        return np.ones_like(self.load.moments.at)

    def fit(self, host: Host) -> tuple[list[float], float]:
        """Coefficients of at least 0, and the sum of squares that they leave."""
        alone = self.load.moments.area(self.level() * self.load.speed(host), self.start, self.end) * self.share
        stretched = self.columns * (self.seconds / np.maximum(_LEAST_S, alone))[:, None]
        found = non_negative(stretched, self.seconds)
        return found, float(np.sum((self.seconds - stretched @ found) ** 2))

    def unexplained(self, host: Host) -> float:
        """The share of the variance that is left."""
        return self.fit(host)[1] / max(_LEAST_S, float(np.sum((self.seconds - self.seconds.mean()) ** 2)))


class _Decoding(_Fit):
    """Of calls. A call waits while all cells train, and while its own takes new weights."""

    def __init__(self, calls: Sequence[RecordedCall], load: Load) -> None:
        self.load = load
        cells = np.array([c.cell for c in calls])
        self.start, self.end, tokens, prompt = np.array([c[:4] for c in calls], dtype=np.float64).T
        beside, taken_in, self.seconds, self.share = (np.zeros(len(calls)) for _ in range(4))
        turns = [t for t, _ in load.changes]
        for cell in np.unique(cells):
            at = np.flatnonzero(cells == cell)
            s, e = self.start[at], self.end[at]
            pulls = _spans(load.pulls.get(str(cell), []))
            moments = Moments(s, e, pulls.ravel(), turns)
            serving = moments.steps(load.changes)
            counts = serving * (moments.level(pulls) == 0)
            self.seconds[at] = moments.area(counts, s, e)
            self.share[at] = self.seconds[at] / np.maximum(_LEAST_S, moments.area(serving, s, e))
            together = moments.area(counts * moments.level(np.stack([s, e], axis=1)), s, e)
            beside[at] = together / np.maximum(_LEAST_S, self.seconds[at])
            order = np.argsort(s)
            so_far = np.concatenate([[0.0], np.cumsum(prompt[at][order])])
            first, last = np.searchsorted(s[order], s, side="left"), np.searchsorted(s[order], e, side="right")
            taken_in[at] = so_far[last] - so_far[first]
        self.columns = np.stack([np.ones(len(calls)), tokens, tokens * beside, taken_in], axis=1)

    def level(self) -> Floats:
        """Where a cell serves."""
        return self.load.serving

    def some(self, count: int) -> _Decoding:
        """At most so many of them, evenly."""
        every, out = max(1, -(-len(self.start) // count)), copy.copy(self)
        for name in ("start", "end", "columns", "seconds", "share"):
            setattr(out, name, getattr(self, name)[::every])
        return out


class _Training(_Fit):
    """Of micro-steps."""

    def __init__(self, micro_steps: Sequence[RecordedMicroStep], load: Load) -> None:
        self.load = load
        self.start, self.end, tokens = np.array([m[:3] for m in micro_steps], dtype=np.float64).T
        self.columns = np.stack([np.ones(len(micro_steps)), tokens], axis=1)
        self.seconds, self.share = self.end - self.start, np.ones(len(micro_steps))


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
