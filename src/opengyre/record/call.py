"""The values a trajectory tree is made of and gives out: attach points, calls, nodes, paths.

What a tree keeps is ``gc=False``: it cannot be part of a cycle, and a run keeps millions of them, which Python's cycle
collector would otherwise walk through again and again on the event loop.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from opengyre.errors import RecordError
from opengyre.record.types import CallMeta, Ids, Logprobs, Span

DIGEST_BYTES = 16  # 2^64 calls before a collision is likely
KEY_BYTES = 16  # likewise for messages
STEM = 20  # hex digits of a call's id in every id it mints: 80 bits, and clients know ids of 24 digits


def new_digest(*parts: Ids) -> hashlib.blake2b:
    """Hash state over token ids (blake2b of little-endian int32), to be fed on with ``feed``."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for ids in parts:
        feed(state, ids)
    return state


def feed(state: hashlib.blake2b, ids: Ids) -> None:
    """Add token ids to a hash state; how they are cut into pieces does not matter."""
    state.update(np.ascontiguousarray(ids, dtype="<i4").data)


def digest_ids(*parts: Ids) -> bytes:
    """Digest of token ids, ``DIGEST_BYTES`` long."""
    return new_digest(*parts).digest()


def own_key(key: bytes, stem: str) -> bytes:
    """Where a reply is found whose ``key`` another reply of the same meaning has; ``stem`` begins its call's id."""
    return hashlib.blake2b(stem.encode(), digest_size=KEY_BYTES, key=key).digest()


class Attach(msgspec.Struct, frozen=True, gc=False):
    """Where a request continues the tree; made by ``Tree.match``, ``Tree.extend`` and ``Tree.at`` only.

    ``offset`` of ``node``'s tokens are shared; ``n_messages`` of the request's messages are. ``via`` and ``depth`` name
    the same place without node numbers - ``depth`` tokens down the path of call ``via`` - and are what is stored: they
    stay true in whatever order concurrent calls were committed.
    """

    node: int
    offset: int
    n_messages: int
    fork_reason: str | None
    via: str
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class CommittedCall:
    """One answered model call, complete and on its own: what is stored, and what the tree grows by.

    Args:
        attach: where its prompt leaves the tree.
        tail_ids: shape (T,), prompt tokens after the attach point, the generation prompt included.
        marks: (key, end offset in ``tail_ids``) of each message after the attach point, in order.
        sampled: what the policy wrote, split where the weights version or the cell changed; empty if nothing.
        reply_key: key of the request's messages plus this reply; None if the reply cannot be continued.
        meta: everything else that is known.
        prompt_digest: ``digest_ids`` of the whole prompt the engine was given - not of what the tree says it was.
        sampled_digest: ``digest_ids`` of all ids the engine returned.
        usable: False if ids or log-probabilities are incomplete: kept, never trained.
    """

    attach: Attach
    tail_ids: Ids
    marks: tuple[tuple[bytes, int], ...]
    sampled: tuple[Span, ...]
    reply_key: bytes | None
    meta: CallMeta
    prompt_digest: bytes
    sampled_digest: bytes
    usable: bool = True

    def __post_init__(self) -> None:
        where = f"call {self.meta.call_id}"
        if self.tail_ids.dtype != np.int32 or self.tail_ids.ndim != 1:
            raise RecordError(
                f"tail ids are {self.tail_ids.dtype} {self.tail_ids.shape}", where=where, right="1-d int32"
            )
        ends = [0, *(end for _, end in self.marks), len(self.tail_ids)]
        if any(a > b for a, b in pairwise(ends)):
            raise RecordError(f"message ends {ends[1:-1]} do not rise within {len(self.tail_ids)} tokens", where=where)
        if any(not span.sampled or not len(span) for span in self.sampled):
            raise RecordError("a reply holds an empty span or one without log-probabilities", where=where)
        if any(len(key) != KEY_BYTES for key, _ in self.marks):
            raise RecordError(f"a message key is not {KEY_BYTES} bytes long", where=where)
        if len(self.prompt_digest) != DIGEST_BYTES or len(self.sampled_digest) != DIGEST_BYTES:
            raise RecordError("lacks the digest of what the engine saw and sampled", where=where)


class Node(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one call added at one place. ``start`` is its depth: tokens from the root to its first token.

    A prompt node has one span, a reply node one per weights version and cell, the root none; ``ids`` are all its tokens
    and the spans' ids are views of them. ``call`` is the position of the call that added it, -1 for the root.
    """

    id: int
    parent: int
    offset: int
    start: int
    ids: Ids
    spans: tuple[Span, ...]
    call: int

    @property
    def sampled(self) -> bool:
        """True for a reply node."""
        return bool(self.spans) and self.spans[0].sampled

    def __len__(self) -> int:
        return len(self.ids)


class CallRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A call as the tree remembers it. The prompt ends in ``prompt_node``, ``prompt_tokens`` below the root."""

    index: int
    meta: CallMeta
    usable: bool
    attach: Attach
    prompt_node: int
    prompt_tokens: int
    reply_node: int | None
    sampled_tokens: int
    prompt_digest: bytes
    sampled_digest: bytes


class Piece(NamedTuple):
    """Tokens [start, stop) of a node, all of one span (cut to what the path uses of it)."""

    node: int
    start: int
    stop: int
    span: Span


class Rebuilt(NamedTuple):
    """A path, token by token; all arrays have shape (T,).

    ``logprobs`` is NaN and ``versions`` -1 where a token was not sampled; ``trainable`` is False there too.
    """

    ids: Ids
    sampled: np.ndarray
    trainable: np.ndarray
    logprobs: Logprobs
    versions: Ids
    nodes: Ids


def owned(spans: tuple[Span, ...]) -> tuple[Ids, tuple[Span, ...]]:
    """Copies nobody can write to, the spans' ids as views of all ids: committed nodes never change."""
    ids, at, own = np.concatenate([span.ids for span in spans]), 0, []
    ids.setflags(write=False)
    for span in spans:
        logprobs = None if span.logprobs is None else span.logprobs.astype(np.float32)
        if logprobs is not None:
            logprobs.setflags(write=False)
        own.append(replace(span, ids=ids[at : at + len(span)], logprobs=logprobs))
        at += len(span)
    return ids, tuple(own)


def cut(span: Span, length: int) -> Span:
    """The first ``length`` tokens of a span."""
    if length == len(span):
        return span
    logprobs = None if span.logprobs is None else span.logprobs[:length]
    return replace(span, ids=span.ids[:length], logprobs=logprobs)
