"""Message keys: equal when two requests mean the same conversation up to and including that message.

    seed(tools) ─▶ key 0 ─▶ key 1 ─▶ ...      key i = digest(key i-1, meaning of message i)

Meaning is parsed values. Ids that somebody minted are left out; a tool result says which call of the preceding turn it
answers by that call's position. Signatures are opaque and left out as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from opengyre.proxy.conversation import Conversation, Message, Text, Thinking, Tool, ToolCall, ToolResult

KEY_BYTES = 16  # 128 bits: no accidental collision in any run
DOUBLE, LARGEST = 2**53, 2**1023  # integers between them are rounded by JavaScript


def keys(conversation: Conversation) -> list[bytes]:
    """One chained digest per message; shape (len(messages),)."""
    key, chain = seed(conversation.tools), []
    calls: list[str] = []
    for message in conversation.messages:
        key = extend(key, message, calls)
        if message.role == "assistant":
            calls = call_ids(message)
        chain.append(key)
    return chain


def seed(tools: Sequence[Tool]) -> bytes:
    """Where a chain starts: tools stand before every message, so they are part of each key."""
    return _digest(b"tools", [[t.name, t.description, t.parameters] for t in tools])


def extend(key: bytes, message: Message, calls: Sequence[str] = ()) -> bytes:
    """The key of ``message`` after ``key``; ``calls`` are the call ids of the preceding assistant turn, in order."""
    return _digest(key, [message.role, [_meaning(part, calls) for part in message.parts]])


def call_ids(message: Message) -> list[str]:
    """Call ids of an assistant turn, in order."""
    return [p.call_id for p in message.parts if isinstance(p, ToolCall)]


def _meaning(part: Any, calls: Sequence[str]) -> list[Any]:
    match part:
        case Text(text):
            return ["text", text]
        case Thinking(text, _):
            return ["thinking", text.strip()]  # clients trim reasoning at its edges
        case ToolCall(_, name, arguments):
            return ["call", name, _integral(arguments)]
        case ToolResult(call_id, text, is_error):
            return ["result", calls.index(call_id) if call_id in calls else -1, text, is_error]
    raise TypeError(f"{type(part).__name__} is no part of a message")


def _integral(value: Any) -> Any:
    """5000.0 and 5000 are one number to every client that speaks JavaScript, and so are neighbours beyond 2^53."""
    if isinstance(value, int) and DOUBLE < abs(value) < LARGEST:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _integral(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_integral(v) for v in value]
    return value


def _digest(key: bytes, value: Any) -> bytes:
    try:
        text = msgspec.json.encode(value, order="deterministic")
    except UnicodeEncodeError:  # half a surrogate pair, in the text of a call's arguments
        written = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        text = written.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=KEY_BYTES, key=key).digest()
