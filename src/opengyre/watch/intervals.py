"""How much a pass rate can be trusted."""

from __future__ import annotations

from math import sqrt

Z_95 = 1.959964  # two-sided 95 % of the normal distribution


def wilson(passes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927); (0, 1) when nothing was measured."""
    if n <= 0:
        return 0.0, 1.0
    p, zz = passes / n, z * z
    centre = (p + zz / (2 * n)) / (1 + zz / n)
    half = z / (1 + zz / n) * sqrt(p * (1 - p) / n + zz / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference(before: tuple[int, int], after: tuple[int, int], z: float = Z_95) -> tuple[float, float]:
    """The interval of ``after - before`` of two independent shares, each (passes, n): Newcombe 1998, method 10."""
    (x0, n0), (x1, n1) = before, after
    if n0 <= 0 or n1 <= 0:
        return -1.0, 1.0
    p0, p1 = x0 / n0, x1 / n1
    low0, high0 = wilson(x0, n0, z)
    low1, high1 = wilson(x1, n1, z)
    low = (p1 - p0) - sqrt((p1 - low1) ** 2 + (high0 - p0) ** 2)
    high = (p1 - p0) + sqrt((high1 - p1) ** 2 + (p0 - low0) ** 2)
    return max(-1.0, low), min(1.0, high)
