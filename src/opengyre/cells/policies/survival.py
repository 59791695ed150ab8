"""How long what runs will still take: estimates from the durations of executions that are over.

    ended, with their durations ─┐
    running, with their ages ────┴─▶ survival curve S ─▶ per group: P(all over within h) ─▶ next group, full step

An execution aged a outlives h more seconds with probability S(a + h) / S(a). S is the Kaplan-Meier estimate (Kaplan &
Meier 1958) on geometric bins; executions that still run are censored at their age, so that a young run does not take
its quick executions for the rule. Beyond the last duration seen, the last hazard goes on. Members of a group count as
independent given their ages; where they are alike, late groups are later than estimated.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 64
_FIRST_S, _LAST_S = 0.05, 1e6  # from the quickest test to eleven days
_EDGES: Floats = np.concatenate([[0.0], np.geomspace(_FIRST_S, _LAST_S, _BINS)])  # a bin is 1.3 times the one before
_PER_LOG = (_BINS - 1) / np.log(_LAST_S / _FIRST_S)  # bins per unit of the logarithm
_FEWEST = 8  # executions over, before their durations say anything
_HORIZONS = 32  # moments at which a wait is looked at; between them it is interpolated
_KEEP = 0.999  # per execution that ends: the policy learns, and what was true 1,000 executions ago fades
_REFRESH_SHARE = 0.05  # of the typical duration: an outlook is as good as new so long
_ROOM = 64  # executions that fit at first; doubled when they do not


class Outlook(msgspec.Struct, frozen=True):
    """Seconds from now; None where it is not known or beyond sight."""

    next_group_s: float | None = None  # until the next group completes, as likely as not
    step_eta_s: float | None = None  # until the open step has all its groups


class Survival:
    """Counts durations; says what is likely. Fed by live runs and by the simulator alike.

    Executions and groups have places in arrays that are used again, so an outlook over 100,000 takes milliseconds.
    """

    def __init__(self) -> None:
        self._ended: Floats = np.zeros(_BINS + 1)
        self._places: dict[str, int] = {}  # execution not over -> its place
        self._groups: dict[str, tuple[int, int]] = {}  # query -> its group number, members not over
        self._free: list[int] = []
        self._free_groups: list[int] = []
        self._start: Floats = np.full(_ROOM, np.nan)  # nan: no execution here; inf: it waits to start
        self._group = np.zeros(_ROOM, dtype=np.int64)
        self._outlook, self._made, self._about = Outlook(), -np.inf, -1
        self._typical_s = 0.0

    def queued(self, execution: str, query: str) -> None:
        """An execution waits to start."""
        if execution in self._places:
            return
        place = self._free.pop() if self._free else len(self._places)
        if place == len(self._start):
            self._start = np.concatenate([self._start, np.full(place, np.nan)])
            self._group = np.concatenate([self._group, np.zeros(place, dtype=np.int64)])
        number, members = self._groups.get(query, (-1, 0))
        if number < 0:
            number = self._free_groups.pop() if self._free_groups else len(self._groups)
        self._groups[query] = (number, members + 1)
        self._places[execution] = place
        self._start[place], self._group[place] = np.inf, number

    def started(self, execution: str, query: str, now: float) -> None:
        """An execution starts."""
        self.queued(execution, query)
        self._start[self._places[execution]] = now

    def ended(self, execution: str, query: str, now: float, *, counts: bool = True) -> None:
        """An execution is over, evaluator included. ``counts``: False if that says nothing about how long they take."""
        place = self._places.pop(execution, None)
        if place is None:
            return
        if counts and np.isfinite(self._start[place]):
            self._ended *= _KEEP
            self._ended[_bin(np.array([now - self._start[place]]))[0]] += 1
        self._start[place] = np.nan
        self._free.append(place)
        number, members = self._groups[query]
        self._groups[query] = (number, members - 1)
        if members == 1:
            del self._groups[query]
            self._free_groups.append(number)

    def outlook(self, now: float, missing: int) -> Outlook:
        """What to expect, if the open step still misses so many groups."""
        if self._ended.sum() < _FEWEST or not self._places:
            return Outlook()
        if missing == self._about and now - self._made < _REFRESH_SHARE * self._typical_s:
            return self._outlook
        used = ~np.isnan(self._start)
        start = self._start[used]
        ages = np.where(np.isinf(start), 0.0, np.maximum(0.0, now - start))
        n_groups = len(self._groups) + len(self._free_groups)
        self._typical_s = typical_s(self._ended)
        self._outlook = expect(self._ended, ages, self._group[used], n_groups, missing)
        self._made, self._about = now, missing
        return self._outlook


def expect(ended: Floats, ages: Floats, groups: NDArray[np.int64], n_groups: int, missing: int) -> Outlook:
    """The outlook from counts of ended durations per bin, and age and group number of every execution not over."""
    bins = _bin(ages)
    log_survival = _log_survival(ended, np.bincount(bins, minlength=_BINS + 1).astype(np.float64))
    horizons = typical_s(ended) * np.geomspace(0.01, 30.0, _HORIZONS)  # at once, to a tail of 30 typical durations
    middles = np.sqrt(np.maximum(_EDGES, _FIRST_S / 2) * np.append(_EDGES[1:], _LAST_S))
    middles[0] = 0.0  # most of them have just started
    now, then = (np.interp(t, _EDGES, log_survival) for t in (middles[:, None], middles[:, None] + horizons))
    log_over = np.log(
        np.maximum(1e-300, -np.expm1(np.minimum(0.0, then - now)))
    )  # (bins, horizons): it is over by then
    members = np.bincount(groups * (_BINS + 1) + bins, minlength=n_groups * (_BINS + 1)).reshape(n_groups, -1)
    if n_groups and np.bincount(groups, minlength=n_groups).min() == 0:
        members = members[members.any(axis=1)]  # numbers that are free now
    complete = np.exp(members.astype(np.float32) @ log_over.astype(np.float32))  # shape (groups, horizons)
    any_yet = 1.0 - np.prod(1.0 - complete, axis=0)
    return Outlook(
        next_group_s=_reaches(horizons, any_yet, 0.5),
        step_eta_s=_reaches(horizons, complete.sum(axis=0), missing) if missing > 0 else 0.0,
    )


def typical_s(ended: Floats) -> float:
    """Geometric mean of the durations counted."""
    return float(np.exp(np.average(np.log(np.maximum(_EDGES, _FIRST_S / 2)), weights=ended)))


def _bin(seconds: Floats) -> NDArray[np.int64]:
    """The bin of a duration: 0 below _FIRST_S, the last one from _LAST_S on."""
    logs = np.log(np.maximum(seconds, _FIRST_S / 2) / _FIRST_S) * _PER_LOG
    bins: NDArray[np.int64] = np.clip(np.floor(logs + 1e-9).astype(np.int64) + 1, 0, _BINS)
    return bins


def _log_survival(ended: Floats, running: Floats) -> Floats:
    """Natural log of S at the edges; S(0) = 1."""
    at_risk = np.cumsum((ended + running)[::-1])[::-1]
    hazard = np.minimum(0.999, ended / np.maximum(at_risk - running / 2, 1e-9))  # censored half way through their bin
    log_s = np.concatenate([[0.0], np.cumsum(np.log1p(-hazard))[:-1]])
    last = int(np.max(np.nonzero(ended)))
    if last < _BINS:
        slope = (log_s[last + 1] - log_s[last]) / (_EDGES[last + 1] - _EDGES[last])
        log_s[last + 1 :] = log_s[last + 1] + slope * (_EDGES[last + 1 :] - _EDGES[last + 1])
    return log_s


def _reaches(horizons: Floats, rising: Floats, level: float) -> float | None:
    """When a rising curve reaches a level, on a straight line between two horizons; None if it does not."""
    if rising[-1] < level:
        return None
    place = int(np.argmax(rising >= level))
    if place == 0:
        return float(horizons[0])
    low, high = rising[place - 1], rising[place]
    share = (level - low) / (high - low)
    return float(horizons[place - 1] + share * (horizons[place] - horizons[place - 1]))
