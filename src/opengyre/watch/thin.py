"""Keeping a picture's shape while dropping most of its points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from opengyre.watch.history import Segment

T = TypeVar("T")


def every(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def extremes(points: Sequence[T], value: Callable[[T], float], most: int) -> list[T]:
    """At most ``most`` points in order: of each bucket the lowest, the highest and the last; no peak is lost."""
    if len(points) <= most:
        return list(points)
    buckets = max(1, most // 3)
    out: list[T] = []
    for i in range(buckets):
        a, b = i * len(points) // buckets, (i + 1) * len(points) // buckets
        values = [value(p) for p in points[a:b]]
        out += [points[j] for j in sorted({a + values.index(min(values)), a + values.index(max(values)), b - 1})]
    return out


def segments(lane: Sequence[Segment], most: int) -> list[Segment]:
    """At most ``most`` segments: a cell's life redrawn on a time grid, each cell of the grid in its main phase."""
    if len(lane) <= most or not lane:
        return list(lane)
    start, width = lane[0].start, (lane[-1].stop - lane[0].start) / most
    out: list[Segment] = []
    i = 0
    for k in range(most):
        a, b = start + k * width, start + (k + 1) * width
        while lane[i].stop <= a and i + 1 < len(lane):
            i += 1
        best, most_s, j = lane[i], -1.0, i
        while j < len(lane) and lane[j].start < b:
            seconds = min(b, lane[j].stop) - max(a, lane[j].start)
            if seconds > most_s:
                best, most_s = lane[j], seconds
            j += 1
        if out and out[-1].state == best.state:
            out[-1].stop = b
        else:
            out.append(Segment(a, b, best.phase, best.state, best.reason))
    return out
