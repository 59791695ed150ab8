"""What is kept of a request once it is recorded, so that the next one of the same history costs what it adds.

    recorded request ──keep──▶ Line ◀──find── next request: the same bytes up to entry i

Thesis: a harness sends its whole history with every call, and all but its end was there before, byte for byte. A line
keeps the bytes to recognise that, and of the messages in them only what later messages refer to: their keys and roles,
the names of their calls. Their words are in the tree, as tokens. An execution has one line per history that grows in it
(its agents), a few at most; over all executions the bytes are bounded, and a line that is gone costs one full reading.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from opengyre.proxy.conversation import Message, Text, ToolCall
from opengyre.record.call import feed, new_digest
from opengyre.record.types import Ids
from opengyre.rollout.tokens import TokenIds

LINES = 6  # histories an execution grows at a time: its main one, a few parallel sub-agents
BUDGET_BYTES = 512 << 20  # of kept bodies; 1,000 executions of 128k tokens
BLOCK_BYTES = 64 << 10  # compared at a time, so that bodies that differ early cost little
BYTES_PER_ID = 10  # 4 as a number, 5 to 6 as text
GROWTH = 1.25  # of an id array that is full
SYSTEM_CHARS, ASKED_CHARS = 200, 400  # as CallMeta says


# Roles of neighbours that may be one turn, or one run of results, which are sorted by their calls.
JOINED = {("assistant", "assistant"), ("tool", "tool")}


class Note(msgspec.Struct, frozen=True, gc=False):
    """What later messages and the record need to know of the messages up to some point.

    ``calls`` are the call ids of the last assistant turn, as the harness names them; the heads are CallMeta's.
    """

    calls: tuple[str, ...] = ()
    system_head: str | None = None
    asked: str = ""
    asked_tail: str = ""

    def after(self, message: Message) -> Note:
        """The note after ``message``, as the harness sent it."""
        match message.role:
            case "assistant":
                return replace(self, calls=tuple(p.call_id for p in message.parts if isinstance(p, ToolCall)))
            case "system" if self.system_head is None:
                return replace(self, system_head=message.text[:SYSTEM_CHARS])
            case "user":
                blocks = [p.text for p in message.parts if isinstance(p, Text)]
                tail = blocks[-1][:ASKED_CHARS] if blocks else ""
                head = tail if len(message.parts) == 1 else message.text[:ASKED_CHARS]  # one string for both, if it can
                return replace(self, asked=head, asked_tail=tail)
        return self


class Trail:
    """Token ids as engines were given them and sampled them along one path: one array that grows at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = np.empty(0, np.int32)
        self._used = 0
        self._text, self._written = bytearray(b"["), 0  # the ids as JSON, as far as anybody asked
        self._text_ends = {0: 1}

    def extend(self, upto: int, ids: Ids) -> Trail:
        """The trail with ``ids`` after its first ``upto``: itself if it ends there, else a copy. Views stay valid."""
        with self._lock:
            if upto != self._used:
                copy = Trail()
                copy._append(self._ids[:upto])
                return copy.extend(upto, ids)
            self._append(ids)
            return self

    def view(self, upto: int) -> Ids:
        """The first ``upto`` ids; nobody can write to them."""
        ids = self._ids[:upto]
        ids.setflags(write=False)
        return ids

    def json(self, upto: int) -> bytes:
        """The first ``upto`` ids as a JSON list; only what is new is written."""
        with self._lock:
            if upto > self._written:
                fresh = msgspec.json.encode(self._ids[self._written : upto].tolist())[1:-1]
                self._text += b"," + fresh if self._written else fresh
                self._written, self._text_ends[upto] = upto, len(self._text)
            if (end := self._text_ends.get(upto)) is not None:
                return b"".join((memoryview(self._text)[:end], b"]"))
        return msgspec.json.encode(self.view(upto).tolist())

    def _append(self, ids: Ids) -> None:
        end = self._used + len(ids)
        if end > len(self._ids):
            grown = np.empty(int(end * GROWTH) + 256, np.int32)
            grown[: self._used] = self._ids[: self._used]
            self._ids = grown
        self._ids[self._used : end] = ids
        self._used = end


class Path(NamedTuple):
    """The first ``depth`` ids of a trail and their digest's state: the path to the end of call ``via``.

    The digest is of what went to and came from engines; the tree, which checks it, keeps its own.
    """

    via: str
    trail: Trail
    depth: int
    state: blake2b

    @classmethod
    def of(cls, ids: Ids) -> Path:
        """A path of its own."""
        return cls("", Trail().extend(0, ids), len(ids), new_digest(ids))

    def extended(self, ids: Ids, via: str = "") -> Path:
        """The path that goes on with ``ids``; O(new) where no other went on before."""
        state = self.state.copy()
        feed(state, ids)
        return Path(via, self.trail.extend(self.depth, ids), self.depth + len(ids), state)

    @property
    def ids(self) -> Ids:
        """All ids, shape (depth,)."""
        return self.trail.view(self.depth)

    @property
    def tokens(self) -> TokenIds:
        """All ids, as an engine takes them."""
        return TokenIds(self.ids, lambda: self.trail.json(self.depth))

    @property
    def digest(self) -> bytes:
        """``digest_ids`` of the ids."""
        return self.state.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A request's history and what is known of it.

    ``start`` is the offset in ``body`` of the history's first entry, ``ends`` that of each entry's end; ``counts`` and
    ``placeholders`` are the messages and placeholders up to there, those of the ``lead`` included. ``messages``,
    ``keys`` and ``notes`` are parallel. ``epoch`` is the history's at the time of reading.
    """

    dialect: str
    body: bytes
    start: int
    ends: list[int]
    counts: list[int]
    placeholders: list[int]
    lead: int
    lead_key: bytes
    messages: tuple[Message, ...]
    keys: list[bytes]
    notes: list[Note]
    epoch: int
    path: Path | None = None

    def shared(self, body: bytes) -> int:
        """How many first entries of ``body``'s history are this line's, byte for byte."""
        return bisect_right(self.ends, common_prefix(self.body, body))

    def goes_on(self, cut: int) -> bool:
        """Does the entry after the first ``cut`` go on with their last turn or run of results?"""
        if not 0 < cut < len(self.ends):
            return False
        at = self.counts[cut - 1]
        return self.counts[cut] == at or (self.messages[at - 1].role, self.messages[at].role) in JOINED

    def clean_cut(self, most: int) -> int:
        """The most entries, ``most`` at most, whose messages nothing after them in this line is part of."""
        while self.goes_on(most):
            most -= 1
        return most

    @property
    def size(self) -> int:
        """Bytes held, roughly."""
        return len(self.body) + (BYTES_PER_ID * self.path.depth if self.path else 0)


class Lines:
    """The lines of all executions, those of the one that was quiet longest given up first. For one event loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget, self._held = budget_bytes, 0
        self._of: OrderedDict[str, list[Line]] = OrderedDict()

    def find(self, execution_id: str, dialect: str, epoch: int, body: bytes) -> tuple[Line | None, int]:
        """The line that shares the most entries with ``body``, and how many."""
        lines = [line for line in self._of.get(execution_id, ()) if line.dialect == dialect and line.epoch == epoch]
        shared = [line.shared(body) for line in lines]
        most = max(shared, default=0)
        if not most:
            return None, 0
        equal = [line for line, n in zip(lines, shared, strict=True) if n == most]
        # Of agents that say the same so far, the one with the same system prompt and tools, where they come last.
        return next((line for line in equal if body.endswith(line.body[line.ends[-1] :])), equal[-1]), most

    def keep(self, execution_id: str, line: Line, *, instead: Line | None = None) -> None:
        """Keep a line, ``instead`` of the one it grew from."""
        lines = [old for old in self._of.pop(execution_id, []) if old is not instead or self._dropped(old)]
        lines.append(line)
        self._held += line.size
        while len(lines) > LINES:
            self._held -= lines.pop(0).size
        self._of[execution_id] = lines
        while self._held > self._budget and len(self._of) > 1:
            self.forget(next(iter(self._of)))

    def forget(self, execution_id: str) -> None:
        """Free an execution's lines; unknown ids are fine."""
        self._held -= sum(line.size for line in self._of.pop(execution_id, ()))

    def _dropped(self, line: Line) -> bool:
        self._held -= line.size
        return False

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))


def skeleton(message: Message) -> Message:
    """What remains of a message whose tokens are recorded: its role, and the names of its calls."""
    calls = tuple(ToolCall(p.call_id, p.name, None) for p in message.parts if isinstance(p, ToolCall))
    return Message(message.role, calls) if calls else _BARE.setdefault(message.role, Message(message.role, ()))


_BARE: dict[str, Message] = {}


def common_prefix(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    at = 0
    while at < n and b.startswith(a[at : min(at + BLOCK_BYTES, n)], at):
        at += BLOCK_BYTES
    if at >= n:
        return n
    differ = np.frombuffer(a, np.uint8, min(BLOCK_BYTES, n - at), at) != np.frombuffer(
        b, np.uint8, min(BLOCK_BYTES, n - at), at
    )
    return at + int(differ.argmax())
