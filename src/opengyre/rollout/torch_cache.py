"""The prefix cache: KV of token prefixes, kept as a radix tree so that shared prefixes are stored once.

A node stores only the tokens it adds and their KV, so memory grows with unique tokens. A path from the root spells a
prefix; two calls that diverge split a node. What is used least recently leaves first, leaf by leaf, so a prefix is
never dropped before what builds on it. Nothing is pinned: a hit is copied into the call's own row at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

Segment = list[Tensor]  # K, V of layer 0, K, V of layer 1, …; each [heads, tokens, dim]
Ids = np.ndarray


def as_ids(ids: Sequence[int]) -> Ids:
    """Token ids in the form the cache compares quickly."""
    return np.asarray(ids, dtype=np.int64)


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of leading tokens two id arrays share."""
    n = min(len(left), len(right))
    differ = left[:n] != right[:n]
    return int(differ.argmax()) if differ.any() else n


@dataclass(eq=False, slots=True)
class _Node:
    ids: Ids
    segment: Segment
    parent: _Node | None
    used_at: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixCache:
    """KV segments by token prefix. ``tokens`` is what it holds; the owner decides how many it may."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node(as_ids([]), [], None)
        self._clock = 0
        self.tokens = 0

    def match(self, ids: Ids) -> tuple[int, list[tuple[Segment, int]]]:
        """Longest cached prefix of ``ids``: its length, and (segment, tokens to take of it) in order."""
        self._clock += 1
        node, at, found = self._root, 0, []
        while at < len(ids) and (child := node.children.get(int(ids[at]))):
            shared = common_prefix(child.ids, ids[at:])
            child.used_at = self._clock
            found.append((child.segment, shared))
            node, at = child, at + shared
            if shared < len(child.ids):
                break
        return at, found

    def insert(self, ids: Ids, copy: Callable[[int, int], Segment]) -> int:
        """Make ``ids`` a cached prefix. ``copy(start, end)`` yields the KV of the part not held yet, if any.

        Returns:
            The number of tokens added.
        """
        self._clock += 1
        node, at = self._root, 0
        while at < len(ids) and (child := node.children.get(int(ids[at]))):
            shared = common_prefix(child.ids, ids[at:])
            if shared < len(child.ids):
                if at + shared == len(ids):
                    break  # ends inside the node: nothing to add, nothing to split
                child = self._split(child, shared)
            child.used_at = self._clock
            node, at = child, at + shared
        else:
            if at < len(ids):
                leaf = _Node(ids[at:].copy(), copy(at, len(ids)), node, self._clock)
                node.children[int(ids[at])] = leaf
                self.tokens += len(ids) - at
                return len(ids) - at
        return 0

    def evict(self, tokens: int) -> int:
        """Drop least recently used leaves until at least ``tokens`` tokens are gone or nothing is left.

        Returns:
            The number of tokens dropped.
        """
        heap: list[tuple[int, int, _Node]] = []

        def walk(node: _Node) -> None:
            pending = [node]
            while pending:
                node = pending.pop()
                pending.extend(node.children.values())
                if not node.children and node.parent is not None:
                    heap.append((node.used_at, id(node), node))

        walk(self._root)
        heapq.heapify(heap)
        dropped = 0
        while heap and dropped < tokens:
            _, _, leaf = heapq.heappop(heap)
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.ids[0])]
            dropped += len(leaf.ids)
            if not parent.children and parent.parent is not None:
                heapq.heappush(heap, (parent.used_at, id(parent), parent))
        self.tokens -= dropped
        return dropped

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper half. Copies, so that evicting a half frees its memory."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.ids[:at].copy(), [t[:, :at].clone() for t in node.segment], parent, node.used_at)
        parent.children[int(node.ids[0])] = upper
        upper.children[int(node.ids[at])] = node
        node.ids, node.segment = node.ids[at:].copy(), [t[:, at:].clone() for t in node.segment]
        node.parent = upper
        return upper
