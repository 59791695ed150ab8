"""What the policy said, kept to undo what harnesses do to it on its way back.

A harness parses a tool call and writes it again: key order, number forms, defaults, trimmed lines, even the tool's name
change. Reasoning may be dropped or trimmed. Parallel results come in completion order. Reading a request puts the
original turn back wherever it can be recognised - by a call id or signature we minted, else by saying the same at the
same place - so that its key, and with it the recorded tokens, are found again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from opengyre.proxy import keys
from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, ToolCall, ToolResult


class Read(NamedTuple):
    """A request as it was meant, with one key per message."""

    conversation: Conversation
    keys: list[bytes]


class History:
    """The turns of one session. Grows with what was sampled, never with what was sent."""

    def __init__(self) -> None:
        self._by_id: dict[str, Message] = {}  # call ids and signatures
        self._by_place: dict[bytes, Message] = {}  # digest of (key before, visible meaning)

    def remember(self, key: bytes, turn: Message, *, delivered: bool) -> None:
        """Keep an assistant ``turn`` that follows the message with ``key``."""
        for part in turn.parts:
            for name in _ids(part):
                self._by_id[name] = turn
        place = keys.extend(key, _visible(turn))
        if delivered or place not in self._by_place:
            self._by_place[place] = turn

    def read(self, conversation: Conversation) -> Read:
        """Restore originals, put tool results in call order, and key every message."""
        key, chain, restored = keys.seed(conversation.tools), list[bytes](), list[Message]()
        calls: list[str] = []
        for message in _in_call_order(conversation.messages):
            if message.role == "assistant":
                calls = keys.call_ids(message)  # as the harness names them: its results refer to these
                message = self._restore(key, message)
            key = keys.extend(key, message, calls)
            chain.append(key)
            restored.append(message)
        return Read(replace(conversation, messages=tuple(restored)), chain)

    def _restore(self, key: bytes, message: Message) -> Message:
        known = [(name, self._by_id[name]) for part in message.parts for name in _ids(part) if name in self._by_id]
        for _, turn in known:
            if _says_the_same(message, turn):
                return turn
        if not known:
            return self._by_place.get(keys.extend(key, _visible(message)), message)
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


def _visible(turn: Message) -> Message:
    return replace(turn, parts=tuple(p for p in turn.parts if not isinstance(p, Thinking)))


def _says_the_same(message: Message, turn: Message) -> bool:
    """Same words and same calls; thinking may be missing and arguments rewritten."""
    return _words(message) == _words(turn) and keys.call_ids(message) == keys.call_ids(turn)


def _words(message: Message) -> str:
    return "".join(p.text for p in message.parts if isinstance(p, Text)).strip()


def _in_call_order(messages: tuple[Message, ...]) -> list[Message]:
    """Each run of tool results sorted by the call it answers; unknown ids keep their place at the end."""
    out: list[Message] = []
    run: list[Message] = []
    calls: list[str] = []

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
