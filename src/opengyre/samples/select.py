"""Which trajectories of an execution are trained, and which of their tokens (SPEC §4.2).

Thesis: a tree is cut into *segments*, runs of tokens that lie on the same set of paths. A drawn path is emitted with
exactly those of its segments trainable that no earlier draw took; so every sampled token is trained at most once,
whatever the picker chooses (SPEC §3.5). The choice is pure: the same tree, run seed and execution id, the same draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Protocol

from opengyre import named
from opengyre.errors import ConfigError
from opengyre.record.types import Role, Span

Key = tuple[int, int, int]  # (node id, start, stop): tokens [start, stop) of one node


class PathTree(Protocol):
    """What selection needs of a trajectory tree (record.tree.Tree is one).

    ``path`` gives (node id, start, stop, span) from the root on: tokens [start, stop) of that node, all of ``span``.
    """

    def leaves(self) -> Sequence[int]:
        """Ids of the leaves, in an order that never depends on chance."""
        ...

    def path(self, leaf: int, /) -> Sequence[tuple[int, int, int, Span]]:
        """The path from the root to ``leaf``."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens shared whole or not at all between paths; ``tokens`` of it may be trained (0: context only)."""

    key: Key
    tokens: int


@dataclass(frozen=True, slots=True)
class Path:
    """One root-to-leaf path as segments."""

    leaf: int
    role: Role
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """A drawn path and the segments of it that are trained here, in path order."""

    path: Path
    trainable: tuple[Key, ...]

    @property
    def leaf(self) -> int:
        """Id of the leaf."""
        return self.path.leaf


Picker = Callable[[Sequence[Path], Sequence[int], Random], int | None]
"""Chooses an index among paths that still have something to train. ``weights`` are their not-yet-masked sampled tokens,
all positive; None stops early. It cannot break "trained once": masks are kept by ``select``, not by the picker."""


def by_priority(paths: Sequence[Path], weights: Sequence[int], random: Random) -> int | None:
    """The default picker: the highest role present; within it, in proportion to the not-yet-masked sampled tokens."""
    order = list(Role)
    first = min((p.role for p in paths), key=order.index)
    ticket = random.randrange(sum(w for p, w in zip(paths, weights, strict=True) if p.role is first))
    for index, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        if path.role is first:
            ticket -= weight
            if ticket < 0:
                return index
    raise AssertionError("a ticket below the total is always somebody's")


def load_picker(name: str | None) -> Picker:
    """A picker by ``module:function``; None is the default. Raises ConfigError when there is no such function."""
    if name is None:
        return by_priority
    picker: Picker = named.load(name, "samples.picker")
    return picker


def seeded(run_seed: int, execution_id: str) -> Random:
    """The random source of one execution; independent of the order in which executions finish."""
    digest = hashlib.blake2b(f"{run_seed}\0{execution_id}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))


def select(
    paths: Sequence[Path],
    *,
    j_max: int,
    run_seed: int,
    execution_id: str,
    picker: Picker = by_priority,
) -> list[Pick]:
    """Choose at most ``j_max`` trajectories of one execution, each with its own trainable tokens.

    Stops early when nothing trainable is left or the picker says so. The order of ``paths`` does not matter: they are
    taken by leaf id.

    Raises:
        ConfigError: the picker returned an index outside the candidates.
    """
    random = seeded(run_seed, execution_id)
    pool = sorted(paths, key=lambda path: path.leaf)
    taken: set[Key] = set()
    picks: list[Pick] = []
    while len(picks) < j_max:
        weighed = [(p, sum(s.tokens for s in p.segments if s.key not in taken)) for p in pool]
        candidates = [(p, weight) for p, weight in weighed if weight]
        if not candidates:
            break
        index = picker([p for p, _ in candidates], [weight for _, weight in candidates], random)
        if index is None:
            break
        if not 0 <= index < len(candidates):
            raise ConfigError(f"picker chose {index} of {len(candidates)} paths", where="samples.picker")
        path = candidates[index][0]
        fresh = tuple(s.key for s in path.segments if s.tokens and s.key not in taken)
        taken.update(fresh)
        picks.append(Pick(path, fresh))
    return picks


def paths_of(tree: PathTree, roles: Mapping[int, Role]) -> list[Path]:
    """A tree's paths as segments: every node is cut where some path enters, leaves or changes span.

    A leaf without a role is a sub-agent's: an unknown history is never preferred over a known one. The very first token
    of a path has no context and is never trainable.
    """
    pieces = {leaf: list(tree.path(leaf)) for leaf in tree.leaves()}
    cuts: dict[int, set[int]] = {}
    for path in pieces.values():
        for node, start, stop, _ in path:
            cuts.setdefault(node, set()).update((start, stop))
    ordered = {node: sorted(places) for node, places in cuts.items()}
    return [
        Path(leaf, roles.get(leaf, Role.SUB_AGENT), tuple(_segments(path, ordered))) for leaf, path in pieces.items()
    ]


def _segments(path: Sequence[tuple[int, int, int, Span]], cuts: Mapping[int, Sequence[int]]) -> Iterator[Segment]:
    position = 0
    for node, start, stop, span in path:
        inner = [start, *(c for c in cuts[node] if start < c < stop), stop]
        for a, b in pairwise(inner):
            tokens = b - a if span.sampled and span.trainable else 0
            yield Segment((node, a, b), tokens - (position == 0 and tokens > 0))
            position += b - a
