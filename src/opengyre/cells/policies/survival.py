"""How long what runs will still take: estimates from the durations of executions that are over.

    ended, with their durations ─┐
    running, with their ages ────┴─▶ survival curve S ─▶ per group: P(all over within h) ─▶ next group, full step

An execution aged a outlives h more seconds with probability S(a + h) / S(a). S is the Kaplan-Meier estimate (Kaplan &
Meier 1958) on geometric bins; executions that still run are censored at their age, so that a young run does not take
its quick executions for the rule. Beyond the last duration seen, the last hazard goes on. Members of a group count as
independent given their ages; where they are alike, late groups are later than estimated.

The counts per group and bin are kept, not made: an outlook looks anew only at executions whose age has left its bin.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 64
_FIRST_S, _LAST_S = 0.05, 1e6  # from the quickest test to eleven days
_EDGES: Floats = np.concatenate([[0.0], np.geomspace(_FIRST_S, _LAST_S, _BINS)])  # a bin is 1.3 times the one before
_EDGE_LIST: list[float] = _EDGES.tolist()  # one number is found faster in a list
_AGES = _BINS + 1  # number of bins: one more below the first edge
_UNTIL: Floats = np.append(_EDGES[1:], [np.inf, np.inf])  # where a bin ends, and one that is asked for past the last
_EARLY = 1 - 1e-8  # an age is looked at before it can have left its bin: start + duration is rounded
_FEWEST = 8  # executions over, before their durations say anything
_HORIZONS: Floats = np.geomspace(0.01, 30.0, 32)  # where a wait is looked at, in typical durations: at once, to a tail
_MIDDLES: Floats = np.sqrt(np.maximum(_EDGES, _FIRST_S / 2) * np.append(_EDGES[1:], _LAST_S))  # of the bins
_MIDDLES[0] = 0.0  # most of them have just started
_LOG_S: Floats = np.log(np.maximum(_EDGES, _FIRST_S / 2))
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
        self._ended: Floats = np.zeros(_AGES)
        self._weight = 0.0  # their sum
        self._places: dict[str, int] = {}  # execution not over -> its place
        self._groups: dict[str, tuple[int, int]] = {}  # query -> its group number, members not over
        self._free: list[int] = []
        self._free_groups: list[int] = []
        self._start: Floats = np.full(_ROOM, np.inf)  # inf: no execution here, or one that waits to start
        self._leaves: Floats = np.full(_ROOM, np.inf)  # when its age is in another bin than it is counted in
        self._group = np.zeros(_ROOM, dtype=np.int64)
        self._bins = np.zeros(_ROOM, dtype=np.int64)
        self._members = np.zeros((_ROOM, _AGES), dtype=np.float32)  # of each group, by the bin of their age
        self._outlook, self._made, self._about = Outlook(), -np.inf, -1
        self._typical_s = 0.0

    def queued(self, execution: str, query: str) -> None:
        """An execution waits to start."""
        if execution in self._places:
            return
        place = self._free.pop() if self._free else len(self._places)
        if place == len(self._start):
            self._start, self._leaves = (
                np.append(times, np.full(place, np.inf)) for times in (self._start, self._leaves)
            )
            self._group, self._bins = (np.append(ids, np.zeros_like(ids)) for ids in (self._group, self._bins))
        number, members = self._groups.get(query, (-1, 0))
        if number < 0:
            number = self._free_groups.pop() if self._free_groups else len(self._groups)
            if number == len(self._members):
                self._members = np.concatenate([self._members, np.zeros_like(self._members)])
        self._groups[query] = (number, members + 1)
        self._places[execution] = place
        self._group[place], self._bins[place] = number, 0
        self._members[number, 0] += 1

    def started(self, execution: str, query: str, now: float) -> None:
        """An execution starts."""
        self.queued(execution, query)
        place = self._places[execution]
        self._start[place], self._leaves[place] = now, now  # its bin is found with the next outlook

    def ended(self, execution: str, query: str, now: float, *, counts: bool = True) -> None:
        """An execution is over, evaluator included. ``counts``: False if that says nothing about how long they take."""
        place = self._places.pop(execution, None)
        if place is None:
            return
        started = float(self._start[place])
        if counts and math.isfinite(started):
            self._ended *= _KEEP
            self._weight = self._weight * _KEEP + 1.0
            self._ended[_bin(now - started)] += 1
        number, members = self._groups[query]
        self._members[number, self._bins[place]] -= 1
        self._start[place] = self._leaves[place] = np.inf
        self._free.append(place)
        self._groups[query] = (number, members - 1)
        if members == 1:
            del self._groups[query]
            self._free_groups.append(number)

    def outlook(self, now: float, missing: int) -> Outlook:
        """What to expect, if the open step still misses so many groups."""
        if self._weight < _FEWEST or not self._places:
            return Outlook()
        if missing == self._about and now - self._made < _REFRESH_SHARE * self._typical_s:
            return self._outlook
        self._count_ages(now)
        members = self._members[: len(self._groups) + len(self._free_groups)]
        self._typical_s = typical_s(self._ended)
        self._outlook = expect(self._ended, members, self._free_groups, missing)
        self._made, self._about = now, missing
        return self._outlook

    def _count_ages(self, now: float) -> None:
        """Count the executions whose age has left its bin in the one where it is now."""
        due = np.flatnonzero(self._leaves <= now)
        before, start = self._bins[due], self._start[due]
        ages = now - start
        bins = before + (ages >= _UNTIL[before])
        far = np.flatnonzero(ages >= _UNTIL[before + 1])  # most go to the next bin; a search takes longer
        bins[far] = np.searchsorted(_EDGES, ages[far], side="right") - 1
        rows, counts = self._group[due] * _AGES, self._members.reshape(-1)  # a view
        np.subtract.at(counts, rows + before, np.float32(1))
        np.add.at(counts, rows + bins, np.float32(1))
        self._bins[due] = bins
        self._leaves[due] = start + _UNTIL[bins] * _EARLY


def expect(ended: Floats, members: NDArray[np.float32], void: Sequence[int], missing: int) -> Outlook:
    """What is likely.

    Args:
        ended: durations per bin.
        members: executions that are not over, per group and bin of their age.
        void: rows of ``members`` that are no group.
        missing: groups that the open step waits for.
    """
    log_survival = _log_survival(ended, members.sum(axis=0).astype(np.float64))
    horizons = typical_s(ended) * _HORIZONS
    now, then = (np.interp(t, _EDGES, log_survival) for t in (_MIDDLES, _MIDDLES + horizons[:, None]))
    over = -np.expm1(np.minimum(0.0, then - now))  # of an execution of that age by then, shape (horizons, bins)
    log_over = np.log(np.maximum(1e-300, over)).astype(np.float32)

    @cache
    def complete(horizon: int) -> NDArray[np.float32]:
        """How likely each group is complete by then."""
        likely: NDArray[np.float32] = np.exp(members @ log_over[horizon])
        likely[void] = 0.0
        return likely

    return Outlook(
        next_group_s=_reaches(horizons, lambda horizon: 1.0 - float(np.prod(1.0 - complete(horizon))), 0.5),
        step_eta_s=_reaches(horizons, lambda horizon: float(complete(horizon).sum()), missing) if missing > 0 else 0.0,
    )


def typical_s(ended: Floats) -> float:
    """Geometric mean of the durations counted."""
    return math.exp(float(ended @ _LOG_S) / float(ended.sum()))


def _bin(seconds: float) -> int:
    """The bin of a duration: 0 below _FIRST_S, the last one from _LAST_S on."""
    return max(0, bisect_right(_EDGE_LIST, seconds) - 1)


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


def _reaches(horizons: Floats, rising: Callable[[int], float], level: float) -> float | None:
    """When a curve reaches a level, on a straight line between two horizons; None if it does not. It rises, so few of
    its points need to be known."""
    place = bisect_left(range(len(horizons)), level, key=rising)
    if place == len(horizons):
        return None
    if place == 0:
        return float(horizons[0])
    low, high = rising(place - 1), rising(place)
    share = (level - low) / (high - low)
    return float(horizons[place - 1] + share * (horizons[place] - horizons[place - 1]))
