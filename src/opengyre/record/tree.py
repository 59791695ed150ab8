"""The trajectory tree of one execution: all its model calls, prefix-shared.

Thesis: a node stores only what its call added, and committed nodes never change. A child hangs at (parent, offset): it
shares the parent's first ``offset`` tokens, so a fork in the middle of a prompt splits nothing. A call adds at most one
prompt node (the harness's new tail) and one reply node (what was sampled). The tree therefore grows with *unique*
tokens, and any path, read root to leaf, is token by token what the engine saw and sampled - checked at every commit
against the digest of the ids the engine was given, in O(new tokens): each node keeps the hash state of its path.

        root ─▶ prompt ─▶ reply ─▶ prompt ─▶ reply        main
                  │ offset 3
                  └─▶ prompt ─▶ reply                     the same head, another end: a fork inside the prompt node

Two ways to share, never mixed up: *messages* are matched on meaning, by chained keys, and may run through replies;
*tokens* are matched by content in prompt nodes only - two sampling events of the same ids stay two samples.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from opengyre.errors import RecordError
from opengyre.record.call import (
    STEM,
    Attach,
    CallRecord,
    CommittedCall,
    Node,
    Piece,
    Rebuilt,
    cut,
    digest_ids,
    feed,
    new_digest,
    own_key,
    owned,
)
from opengyre.record.types import Ids, Span

ROOT = 0


class Tree:
    """The tree of one execution. Every method may be called from any thread; ``commit`` is the only one that writes.

    Args:
        verify: compare each commit with the engine's digests and refuse a difference. ``check_tree`` turns it off to
            report all differences of a stored tree instead of stopping at the first.
    """

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify
        self._lock = threading.Lock()
        self._nodes: list[Node] = [Node(ROOT, -1, 0, 0, np.empty(0, np.int32), (), -1)]
        self._children: list[tuple[int, ...]] = [()]
        self._hashes: list[hashlib.blake2b] = [new_digest()]  # hash state of the path to each node's end
        self._heads: dict[tuple[int, int, int], int] = {}  # (node, offset, first token) -> its prompt child: unique
        self._continued: set[int] = set()  # nodes with a child at their very end
        self._places: dict[bytes, tuple[int, int]] = {}  # message key -> (node, offset) where that message ends
        self._requests: set[bytes] = set()  # keys of the last message of every answered request
        self._calls: list[CallRecord] = []
        self._index: dict[str, int] = {}  # call id -> position in _calls
        self._twins = 0  # replies under a key of their own
        self.moved = 0  # times a key came to lead to another reply; what was read by it would be read otherwise now

    # -- reading a request -------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Attach:
        """Where a request continues the tree: the longest recorded prefix of its messages, O(messages).

        ``keys`` are chained digests, one per message; key i commits to messages 0..i and to the tools. Any inner node
        can be continued. Of replies with one key (the same meaning after the same messages) the first that counts has
        it: delivered and usable, or continued. The others are found by the ids they minted (``own``). ``fork_reason``
        is None where the match ends a leaf or the tree is empty, else

        - ``retry``: all messages are those of a request already answered;
        - ``branch``: it ends at a reply that already goes on in another way (a rewind, a summary call);
        - ``history_edited``: it ends inside a prompt: a reply, or a message after it, was dropped or changed;
        - ``new_root``: nothing is shared (a sub-agent, a changed tool set).
        """
        with self._lock:
            for n in range(len(keys), 0, -1):
                place = self._places.get(keys[n - 1])
                if place is not None:
                    break
            else:
                return self._attach(ROOT, 0, 0, "new_root" if self._calls else None)
            node, offset = place
            reason: str | None = None
            if n == len(keys) and keys[-1] in self._requests:
                reason = "retry"
            elif offset < len(self._nodes[node]) or node in self._continued:
                reason = "branch" if self._nodes[node].sampled else "history_edited"
            return self._attach(node, offset, n, reason)

    def own(self, key: bytes, stems: Iterable[str]) -> bytes:
        """The key of an assistant turn that says what ``key`` says and holds ids minted by calls of these ``stems``.

        It is ``key`` unless one of the calls has its reply under a key of its own.
        """
        if self._twins:
            for stem in stems:
                if (own := own_key(key, stem)) in self._places:
                    return own
        return key

    def extend(self, attach: Attach, tail_ids: Ids) -> tuple[Attach, Ids]:
        """Share as much of ``tail_ids`` as recorded prompts already hold; returns the deeper attach and what is left.

        Never enters sampled tokens. ``commit`` does the same again, so calling this first is optional.
        """
        with self._lock:
            node, offset = self._descend(attach.node, attach.offset, tail_ids)
            deeper = self._attach(node, offset, attach.n_messages, attach.fork_reason)
            return deeper, tail_ids[deeper.depth - attach.depth :]

    def prompt_ids(self, attach: Attach) -> Ids:
        """All ids from the root up to the attach point, shape (attach.depth,)."""
        way = [(self._nodes[name], used) for name, used in self.ancestors(attach.node)]
        if way:
            way[-1] = (way[-1][0], attach.offset)
        return np.concatenate([np.empty(0, np.int32), *(node.ids[:used] for node, used in way)])

    def last_id(self, attach: Attach) -> int | None:
        """The id just before the attach point; None at the root."""
        return int(self._nodes[attach.node].ids[attach.offset - 1]) if attach.depth else None

    def at(self, via: str, depth: int, n_messages: int = 0, fork_reason: str | None = None) -> Attach:
        """The attach point ``depth`` tokens down the path of call ``via`` (``""``: the root); how a store refers to it.

        Raises:
            RecordError: the call is not in this tree, or its path is shorter.
        """
        with self._lock:
            if not via:
                return self._attach(ROOT, 0, n_messages, fork_reason)
            if via not in self._index:
                raise RecordError(f"attaches to call {via}, which is not in the tree")
            record = self._calls[self._index[via]]
            if not 0 <= depth <= record.prompt_tokens + record.sampled_tokens:
                raise RecordError(f"attaches {depth} tokens down call {via}, which has fewer")
            end = record.prompt_node if record.reply_node is None else record.reply_node
            return self._attach(*self._place(end, depth), n_messages, fork_reason)

    # -- writing a call ----------------------------------------------------------------------------------------------

    def commit(self, call: CommittedCall) -> tuple[int, int]:
        """Add an answered call: O(new tokens). Concurrent commits, on one attach point too, are fine in any order.

        Returns:
            The node its prompt ends in (a shared one if the prompt held nothing new) and its reply node (the prompt's
            if nothing was sampled).

        Raises:
            RecordError: the call is there already, its attach point is of another tree, or path plus tail is not what
                the engine saw. Nothing has been added then.
        """
        with self._lock:
            self._check_attach(call)
            node, offset = self._descend(call.attach.node, call.attach.offset, call.tail_ids)
            shared = self._nodes[node].start + offset - call.attach.depth
            tail = call.tail_ids[shared:]
            if self._verify:
                self._check_digests(call, node, offset, tail)
            index = len(self._calls)
            prompt_tokens = call.attach.depth + len(call.tail_ids)
            if len(tail):
                node, offset = self._add(node, offset, (Span(tail),), index), len(tail)
            reply = self._add(node, offset, call.sampled, index) if call.sampled else None
            for key, end in call.marks:
                self._places[key] = self._place(node, call.attach.depth + end)
            if call.marks:
                self._requests.add(call.marks[-1][0])
            record = CallRecord(
                index=index,
                meta=call.meta,
                usable=call.usable,
                attach=call.attach,
                prompt_node=node,
                prompt_tokens=prompt_tokens,
                reply_node=reply,
                sampled_tokens=sum(map(len, call.sampled)),
                prompt_digest=call.prompt_digest,
                sampled_digest=call.sampled_digest,
            )
            self._calls.append(record)
            self._index[call.meta.call_id] = index
            if call.reply_key is not None and reply is not None:
                self._remember_reply(call.reply_key, reply)
            return node, node if reply is None else reply

    def _remember_reply(self, key: bytes, reply: int) -> None:
        here, old = (reply, len(self._nodes[reply])), self._places.get(key)
        if old is not None and self._nodes[old[0]].sampled:
            counts = old[0] in self._continued or self.trainable(old[0])
            other = reply if counts else old[0]
            self._places[own_key(key, self.call_of(other).meta.call_id[:STEM])] = here if counts else old
            self._twins += 1
            if counts:
                return
            self.moved += 1
        self._places[key] = here

    def _check_attach(self, call: CommittedCall) -> None:
        where, at = f"call {call.meta.call_id}", call.attach
        if call.meta.call_id in self._index:
            raise RecordError("committed twice", where=where)
        if not 0 <= at.node < len(self._nodes) or not 0 <= at.offset <= len(self._nodes[at.node]):
            raise RecordError(f"attaches to node {at.node} at {at.offset}, which does not exist", where=where)
        if self._nodes[at.node].start + at.offset != at.depth:
            raise RecordError("its attach point belongs to another tree", where=where)

    def _check_digests(self, call: CommittedCall, node: int, offset: int, tail: Ids) -> None:
        seen = self._hash_at(node, offset)
        feed(seen, tail)
        if seen.digest() != call.prompt_digest:
            raise RecordError("path and tail are not the prompt the engine saw", where=f"call {call.meta.call_id}")
        if digest_ids(*(span.ids for span in call.sampled)) != call.sampled_digest:
            raise RecordError("its spans are not what the engine sampled", where=f"call {call.meta.call_id}")

    def _add(self, parent: int, offset: int, spans: tuple[Span, ...], call: int) -> int:
        above = self._nodes[parent]
        ids, spans = owned(spans)
        node = Node(len(self._nodes), parent, offset, above.start + offset, ids, spans, call)
        state = self._hash_at(parent, offset)
        feed(state, ids)
        self._nodes.append(node)
        self._children.append(())
        self._hashes.append(state)
        self._children[parent] += (node.id,)
        if offset == len(above):
            self._continued.add(parent)
        if not node.sampled:
            self._heads[parent, offset, int(ids[0])] = node.id
        return node.id

    # -- places ------------------------------------------------------------------------------------------------------

    def _attach(self, node: int, offset: int, n_messages: int, reason: str | None) -> Attach:
        call = self._nodes[node].call
        via = self._calls[call].meta.call_id if call >= 0 else ""
        return Attach(node, offset, n_messages, reason, via, self._nodes[node].start + offset)

    def _place(self, node: int, depth: int) -> tuple[int, int]:
        """The (node, offset) ``depth`` tokens down the path through ``node``; offset is 0 only at the root."""
        while node != ROOT and self._nodes[node].start >= depth:
            node = self._nodes[node].parent
        return node, depth - self._nodes[node].start

    def _descend(self, node: int, offset: int, tail: Ids) -> tuple[int, int]:
        """Follow ``tail`` through prompt nodes. At any place the ways on differ in their first token, so it is one."""
        while len(tail):
            here = self._nodes[node]
            if offset < len(here) and not here.sampled and here.ids[offset] == tail[0]:
                shared = _common(here.ids[offset:], tail)
                offset, tail = offset + shared, tail[shared:]
                continue
            child = self._heads.get((node, offset, int(tail[0])))
            if child is None:
                break
            node, offset = child, 0
        return node, offset

    def _hash_at(self, node: int, offset: int) -> hashlib.blake2b:
        """Hash state of the path up to (node, offset); a fork inside a node re-reads that node's shared part only."""
        parts: list[tuple[int, int]] = []
        while offset < len(self._nodes[node]):
            parts.append((node, offset))
            node, offset = self._nodes[node].parent, self._nodes[node].offset
        state = self._hashes[node].copy()
        for inner, stop in reversed(parts):
            feed(state, self._nodes[inner].ids[:stop])
        return state

    # -- reading paths -----------------------------------------------------------------------------------------------

    def leaves(self) -> list[int]:
        """Nodes at whose end nothing hangs, in the order of their calls. Prompts that were never answered count."""
        return [n.id for n in self._nodes[1:] if n.id not in self._continued]

    def trainable(self, node: int) -> bool:
        """True if what ``node`` sampled may be trained: its call is usable and the harness saw the reply.

        A reply marked undelivered that a later request continues was seen after all: harnesses act on complete parts of
        a stream that broke.
        """
        if not self._nodes[node].sampled:
            return False
        call = self._calls[self._nodes[node].call]
        return call.usable and (call.meta.delivered or node in self._continued)

    def path(self, leaf: int) -> list[Piece]:
        """The path to a node's end as (node, start, stop, span); start and stop count tokens inside the node.

        Spans of replies that must not be trained come with ``trainable`` False.
        """
        return list(self._pieces(leaf))

    def rebuild(self, leaf: int) -> Rebuilt:
        """The path to a node's end, token by token."""
        pieces = self.path(leaf)
        total = self._nodes[leaf].start + len(self._nodes[leaf])
        out = Rebuilt(
            ids=np.empty(total, np.int32),
            sampled=np.zeros(total, bool),
            trainable=np.zeros(total, bool),
            logprobs=np.full(total, np.nan, np.float32),
            versions=np.full(total, -1, np.int32),
            nodes=np.empty(total, np.int32),
        )
        for node, first, last, span in pieces:
            start, stop = self._nodes[node].start + first, self._nodes[node].start + last
            out.ids[start:stop], out.nodes[start:stop] = span.ids, node
            if span.logprobs is not None:
                out.sampled[start:stop], out.trainable[start:stop] = True, span.trainable
                out.logprobs[start:stop], out.versions[start:stop] = span.logprobs, span.version or 0
        return out

    def ancestors(self, node: int) -> list[tuple[int, int]]:
        """(node, tokens of it on the path) from below the root down to and including ``node``."""
        way = [(node, len(self._nodes[node]))] if node != ROOT else []
        while self._nodes[node].parent > ROOT:
            way.append((self._nodes[node].parent, self._nodes[node].offset))
            node = self._nodes[node].parent
        return way[::-1]

    def places(self) -> dict[bytes, tuple[int, int]]:
        """Message key to the (node, offset) where that message ends."""
        with self._lock:
            return dict(self._places)

    def children(self, node: int) -> list[int]:
        """Nodes that hang at ``node``, at any offset, oldest first."""
        return list(self._children[node])

    def node(self, node: int) -> Node:
        """A committed node."""
        return self._nodes[node]

    def calls(self) -> list[CallRecord]:
        """All calls in the order in which they were committed."""
        return list(self._calls)

    def call_of(self, node: int) -> CallRecord:
        """The call that added a node. Raises RecordError for the root, which no call added."""
        if node == ROOT:
            raise RecordError("the root belongs to no call")
        return self._calls[self._nodes[node].call]

    def continues(self, call: CallRecord) -> CallRecord | None:
        """The call whose reply is the last one in this call's prompt; None if there is none."""
        node = self._nodes[call.prompt_node]
        while node.id != ROOT and not node.sampled:
            node = self._nodes[node.parent]
        return self._calls[node.call] if node.id != ROOT else None

    @property
    def unique_tokens(self) -> int:
        """Tokens stored."""
        return sum(map(len, self._nodes))

    def __len__(self) -> int:
        return len(self._nodes)

    def _pieces(self, node: int) -> Iterator[Piece]:
        for name, used in self.ancestors(node):
            here = self._nodes[name]
            mute = here.sampled and not self.trainable(name)
            start = 0
            for span in here.spans:
                part = cut(span, min(len(span), used - start))
                if len(part):
                    yield Piece(name, start, start + len(part), replace(part, trainable=False) if mute else part)
                start += len(part)


def _common(a: Ids, b: Ids) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and bool(differ[first]) else n
