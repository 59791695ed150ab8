"""What the policy said, kept to undo what harnesses do to it on its way back.

A harness parses a tool call and writes it again: key order, number forms, defaults, trimmed lines, even the tool's name
change. Reasoning may be dropped or trimmed. Parallel results come in completion order. Reading a request puts the
original turn back wherever it can be recognised - by a call id or signature we minted, else by saying the same at the
same place - so that its key, and with it the recorded tokens, are found again. Where several conversations of one
execution were told the same, the ids decide whose turn it is; without them it is the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Part, Text, Thinking, ToolCall, ToolResult
from opengyre.proxy.lines import Note
from opengyre.proxy.reply import stem
from opengyre.record.tree import Tree


class Read(NamedTuple):
    """Messages as they were meant; ``keys`` and ``notes`` are parallel to them."""

    messages: list[Message]
    keys: list[bytes]
    notes: list[Note]


class History:
    """The turns of one session. Grows with what was sampled, and by a digest per turn that somebody else wrote.

    ``epoch`` rises whenever a turn that was read before would be read in another way now.

    Args:
        tree: of the session; it knows which replies share a key.
    """

    def __init__(self, tree: Tree | None = None) -> None:
        self._tree = tree or Tree()
        self._epoch = 0
        self._by_id: dict[str, Message] = {}  # call ids and signatures
        self._by_place: dict[bytes, Message] = {}  # digest of (key before, visible meaning)
        self._unseen: set[bytes] = set()  # places whose turn was not delivered, and never came back
        self._strange: set[bytes | str] = set()  # ids and places that were asked for and not known

    @property
    def epoch(self) -> int:
        """Changes only by rising."""
        return self._epoch + self._tree.moved

    def remember(self, key: bytes, turn: Message, *, delivered: bool) -> None:
        """Keep an assistant ``turn`` that follows the message with ``key``."""
        names = [name for part in turn.parts for name in _ids(part)]
        # An id that is known already is not ours alone: what was read by it would be read as this turn now.
        self._epoch += not self._by_id.keys().isdisjoint(names)
        self._by_id.update((name, turn) for name in names)
        known: list[bytes | str] = [*names]
        place = keys.extend(key, _visible(turn))
        if place not in self._by_place or place in self._unseen:  # the first that was seen stays
            self._epoch += place in self._by_place
            self._by_place[place] = turn
            (self._unseen.discard if delivered else self._unseen.add)(place)
            known.append(place)
        self._epoch += not self._strange.isdisjoint(known)

    def read(self, messages: Sequence[Message], key: bytes, note: Note) -> Read:
        """Restore originals, put tool results in call order, and key every message.

        ``key`` and ``note`` are those of what stands before: ``keys.seed`` of the tools and an empty note, or those of
        an earlier message whose turn or run of tool results ``messages`` do not continue.
        """
        read = Read([], [], [])
        for message in _in_call_order(messages, note.calls):
            note = note.after(message)  # call ids as the harness names them: its results refer to these
            meant = self._restore(key, message) if message.role == "assistant" else message
            key = self._tree.own(keys.extend(key, meant, note.calls), _stems(message))
            read.messages.append(meant)
            read.keys.append(key)
            read.notes.append(note)
        return read

    def _restore(self, key: bytes, message: Message) -> Message:
        names = [name for part in message.parts for name in _ids(part)]
        known = [(name, self._by_id[name]) for name in names if name in self._by_id]
        self._strange.update(name for name in names if name not in self._by_id)
        for _, turn in known:
            if _says_the_same(message, turn):
                if self._unseen:
                    self._unseen.discard(keys.extend(key, _visible(turn)))
                return turn
        if not known:
            place = keys.extend(key, _visible(message))
            turn = self._by_place.get(place, message)
            if turn is message:
                self._strange.add(place)
            self._unseen.discard(place)
            return turn
        originals = {p.call_id: p for _, turn in known for p in turn.parts if isinstance(p, ToolCall)}
        parts = [originals.get(p.call_id, p) if isinstance(p, ToolCall) else p for p in message.parts]
        return replace(message, parts=tuple(parts))


def _ids(part: Part) -> list[str]:
    match part:
        case ToolCall(call_id, _, _):
            return [call_id]
        case Thinking(_, signature) if signature:
            return [signature]
    return []


def _stems(message: Message) -> Iterator[str]:
    return (found for part in message.parts for name in _ids(part) if (found := stem(name)))


def _visible(turn: Message) -> Message:
    return replace(turn, parts=tuple(p for p in turn.parts if not isinstance(p, Thinking)))


def _says_the_same(message: Message, turn: Message) -> bool:
    """Same words and same calls; thinking may be missing and arguments rewritten."""
    return _words(message) == _words(turn) and keys.call_ids(message) == keys.call_ids(turn)


def _words(message: Message) -> str:
    return "".join(p.text for p in message.parts if isinstance(p, Text)).strip()


def _in_call_order(messages: Sequence[Message], calls: Sequence[str]) -> list[Message]:
    """Each run of tool results sorted by the call it answers; unknown ids keep their place at the end."""
    out: list[Message] = []
    run: list[Message] = []

    def rank(message: Message) -> int:
        (result,) = (p for p in message.parts if isinstance(p, ToolResult))
        return calls.index(result.call_id) if result.call_id in calls else len(calls)

    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        out += sorted(run, key=rank)
        run = []
        if message.role == "assistant":
            calls = keys.call_ids(message)
        out.append(message)
    return out + sorted(run, key=rank)
