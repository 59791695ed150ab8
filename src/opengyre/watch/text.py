"""Figures and short texts for people: durations, counts, bars, sparklines. Pure, and safe to print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")  # CSI, OSC, two-character ones
_TICKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float | None) -> str:
    """A length of time in at most two units: ``8.52s``, ``3m 05s``, ``1h 02m``, ``2d 03h``; ``-`` when unknown."""
    if seconds is None or seconds != seconds:
        return "-"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def count(number: float) -> str:
    """A count in at most four characters and a unit: ``812``, ``12.3k``, ``4.56M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            size = number / (1e3 if unit == "k" else limit)
            return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f}{unit}"
    return f"{number:.0f}"


def figure(number: float | None, digits: int = 3) -> str:
    """A measured number with ``digits`` significant digits; ``-`` when missing or not a number."""
    return "-" if number is None or number != number else f"{number:#.{digits}g}".rstrip(".")


def percent(share: float | None) -> str:
    """A share as ``41.3 %``; ``-`` when missing."""
    return "-" if share is None or share != share else f"{100 * share:.1f} %"


def plural(n: int, word: str) -> str:
    """A counted noun: ``1 call``, ``3 calls``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def plain(text: object) -> str:
    """One printable line: terminal escape sequences are dropped, other control characters become spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", str(text))).split())


def bar(share: float, width: int) -> tuple[str, str]:
    """A bar of ``width`` characters as (filled, empty)."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full, "─" * (width - full)


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """``values`` as one line of ``width`` characters at most; each character is the mean of an equal share of them."""
    if not values or width < 1:
        return ""
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    floor = min(means) if low is None else low
    span = (max(means) if high is None else high) - floor
    if span <= 0:
        return _TICKS[0 if floor == 0 else 3] * n
    last = len(_TICKS) - 1
    return "".join(_TICKS[max(0, min(last, round((m - floor) / span * last)))] for m in means)
