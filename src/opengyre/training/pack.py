"""Trajectories of a micro-step packed so that a common prefix is computed once.

Thesis: a token's log-probability depends on the ids before it and on nothing else. Sort the trajectories by their ids,
and each shares with its predecessor the longest prefix it shares with any before it; only its tail is new. So a set of
trees, of one execution or of many with the same prompt, becomes one row of tails in depth-first order:

    A = a b c d e      packed:  a b c d e | x y | r s t          chains:  A: own (0,5)
    B = a b c x y      depth:   0 1 2 3 4   3 4   0 1 2                   B: own (5,2), before it (0,3)
    C = r s t                                                             C: own (7,3)

Position ids are depths. The hidden state that predicts a token is its own predecessor's on the path, which for ``x`` is
``c`` and not ``e``: labels are gathered per trajectory, never shifted. Every chain's queries attend to the keys before
it and to its own. The packed size is the number of unique tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from opengyre.samples.build import windows_pay
from opengyre.samples.types import Sample

Index = NDArray[np.int64]
Run = tuple[int, int]  # start and length of a stretch of the packed row


@dataclass(frozen=True, slots=True)
class Chain:
    """A trajectory's new tokens: ``own`` in the packed row, seen after the stretches ``before``."""

    own: Run
    before: tuple[Run, ...]

    @property
    def depth(self) -> int:
        """Tokens before it on its path."""
        return sum(length for _, length in self.before)


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass. ``ids`` and ``positions`` have shape (N,); the others one entry a trainable token (M,).

    ``sources`` is where in the row a trainable token is predicted, ``labels`` the token, ``rows`` its sample.
    """

    samples: tuple[Sample, ...]
    ids: Index
    positions: Index
    chains: tuple[Chain, ...]
    sources: Index
    labels: Index
    rows: Index


def ordered(samples: Sequence[Sample]) -> list[Sample]:
    """Sorted by ids, token by token, so that neighbours share the most; ties by sample id, so that order is fixed."""
    return sorted(samples, key=lambda s: (s.ids.astype(">u4").tobytes(), s.sample_id))


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-d arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def pack(samples: Sequence[Sample]) -> Pack:
    """Pack all ``samples`` into one row. The order of the samples in the result is its own."""
    samples = ordered(samples)
    size, path, runs, previous = 0, np.empty(0, np.int64), list[Run](), np.empty(0, np.int32)
    ids, positions, chains = list[np.ndarray](), list[np.ndarray](), list[Chain]()
    sources, labels, counts = list[np.ndarray](), list[np.ndarray](), list[int]()
    for sample in samples:
        shared = shared_prefix(previous, sample.ids)
        runs, tail = _cut(runs, shared), len(sample.ids) - shared
        if tail:
            chains.append(Chain((size, tail), tuple(runs)))
            runs.append((size, tail))
        path = np.concatenate([path[:shared], np.arange(size, size + tail)])
        ids.append(sample.ids[shared:])
        positions.append(np.arange(shared, shared + tail))
        trained = np.flatnonzero(sample.mask)
        sources.append(path[trained - 1])
        labels.append(sample.ids[trained])
        counts.append(len(trained))
        size, previous = size + tail, sample.ids
    return Pack(
        samples=tuple(samples),
        ids=_join(ids),
        positions=_join(positions),
        chains=tuple(chains),
        sources=_join(sources),
        labels=_join(labels),
        rows=np.repeat(np.arange(len(samples)), counts),
    )


def within_budget(samples: Sequence[Sample], budget: int, row: int | None = None) -> list[Pack]:
    """As few packs as a greedy walk gives, of at most ``budget`` unique tokens each; a longer sample goes alone.

    With ``row``, a pack may have up to that many tokens where that saves work: it is then computed in windows of
    ``budget`` tokens.
    """
    bins, size, previous = list[list[Sample]](), budget, np.empty(0, np.int32)
    for sample in ordered(samples):
        shared = shared_prefix(previous, sample.ids)
        new = len(sample.ids) - shared
        saves = row is not None and size + new <= row and windows_pay(size, size + new, sample, budget)
        if not bins or (size + new > budget and not saves):
            bins.append([])
            size, new = 0, len(sample.ids)
        bins[-1].append(sample)
        size, previous = size + new, sample.ids
    return [pack(each) for each in bins]


@dataclass(frozen=True, slots=True)
class Window:
    """Rows ``first`` to ``last`` of a pack, computed at once.

    ``chains`` cover the row up to ``last``, cut at the edges of windows; ``trained`` are the trainable tokens (places
    in ``Pack.sources``) predicted in it.
    """

    first: int
    last: int
    chains: tuple[Chain, ...]
    trained: Index


def windows(packed: Pack, tokens: int) -> list[Window]:
    """Cut a pack into windows of at most ``tokens`` rows; what a row sees lies in its own window or an earlier one."""
    pieces = list[Chain]()
    for chain in packed.chains:
        before = [piece for run in chain.before for piece in _at_edges(run, tokens)]
        for piece in _at_edges(chain.own, tokens):
            pieces.append(Chain(piece, tuple(before)))
            before.append(piece)
    made = list[Window]()
    for first in range(0, len(packed.ids), tokens):
        last = min(first + tokens, len(packed.ids))
        known = tuple(piece for piece in pieces if piece.own[0] < last)
        trained = np.flatnonzero((packed.sources >= first) & (packed.sources < last))
        made.append(Window(first, last, known, trained))
    return made


def _at_edges(run: Run, tokens: int) -> list[Run]:
    """A run cut at every multiple of ``tokens``."""
    start, length = run
    edges = [start, *range((start // tokens + 1) * tokens, start + length, tokens), start + length]
    return [(a, b - a) for a, b in pairwise(edges)]


def _cut(runs: list[Run], length: int) -> list[Run]:
    kept = list[Run]()
    for start, size in runs:
        if length <= 0:
            break
        kept.append((start, min(size, length)))
        length -= size
    return kept


def _join(parts: list[np.ndarray]) -> Index:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
