"""When cells are lost: at hours that a user gives, and by chance. The same moments for simulated and for paced runs."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import merge

from opengyre.errors import ConfigError


def check_lost_at(lost_at_h: Mapping[str, Sequence[float]], cells: Collection[str], where: str) -> None:
    """Raises ConfigError for a cell that is not there, or an hour before the start."""
    for cell, hours in lost_at_h.items():
        if cell not in cells:
            raise ConfigError(repr(cell), where=where, right=f"one of {', '.join(cells)}")
        if any(hour < 0 for hour in hours):
            raise ConfigError(f"{min(hours)}", where=f"{where}.{cell}", right="hours since the start, at least 0")


def moments(cell: str, mtbf_h: float, lost_at_h: Mapping[str, Sequence[float]], seed: int) -> Iterator[float]:
    """Seconds since the start at which a cell is lost if it is alive then, rising.

    Args:
        cell: its name.
        mtbf_h: mean hours between two failures of one cell, exponential; 0: none by chance.
        lost_at_h: hours since the start by cell.
        seed: of chance; each cell has its own.
    """
    given = (3600 * hours for hours in sorted(lost_at_h.get(cell, ())))
    return merge(given, _by_chance(mtbf_h, random.Random(f"{seed} {cell}"))) if mtbf_h else given


def _by_chance(mtbf_h: float, chance: random.Random) -> Iterator[float]:
    moment = 0.0
    while True:
        moment += chance.expovariate(1 / (mtbf_h * 3600))
        yield moment
