"""What a wire format has to offer the proxy: requests in, turns out, errors in its own form.

    body ─ parse ─▶ Conversation        Reply ─ body ─▶ JSON        Reply ─ emitter ─▶ SSE frames

The support contract of each dialect is three lists at the top of its file: honoured, ignored, refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opengyre.proxy.conversation import Conversation, Part, Text, Thinking
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply, Turn


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an answer before it is sampled. ``asked`` is this request, as its dialect parsed it."""

    call_id: str
    asked: Conversation
    prompt_tokens: int
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name the harness asked for."""
        return self.asked.model


class Emitter(Protocol):
    """Writes one answer as server-sent events. ``open`` first, then any mix of pings and deltas, ``close`` last."""

    def open(self) -> bytes:
        """What can be said before anything is sampled."""
        ...

    def ping(self) -> bytes:
        """Keeps the client waiting; not part of the message."""
        ...

    def delta(self, kind: str, text: str) -> bytes:
        """A piece of ``thinking`` or ``text``, released early."""
        ...

    def close(self, reply: Reply) -> bytes:
        """All that was not released yet, and the end."""
        ...

    def fail(self, refusal: Refusal) -> bytes:
        """An error after the start."""
        ...


class Dialect(Protocol):
    """One wire format."""

    name: str

    def parse(self, body: dict[str, Any]) -> Conversation:
        """Read a request. Raises Refusal (400) naming the field that is wrong."""
        ...

    def body(self, head: Head, reply: Reply) -> dict[str, Any]:
        """The whole answer."""
        ...

    def emitter(self, head: Head) -> Emitter:
        """A writer for the streamed answer."""
        ...

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """An error body."""
        ...


class Released:
    """How much of a turn's thinking and text went out as deltas; the rest is what ``close`` owes."""

    def __init__(self) -> None:
        self._sent = {"thinking": 0, "text": 0}

    def add(self, kind: str, text: str) -> None:
        """Note a delta."""
        self._sent[kind] += len(text)

    def rest(self, turn: Turn) -> tuple[str, str]:
        """(thinking, text) of ``turn`` that was not released."""
        thinking = "".join(p.text for p in turn.parts if isinstance(p, Thinking))
        text = "".join(p.text for p in turn.parts if isinstance(p, Text))
        return thinking[self._sent["thinking"] :], text[self._sent["text"] :]


def compact(value: Any) -> str:
    """JSON as it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def typed(where: str, value: Any, kind: type | tuple[type, ...], *, default: Any = None) -> Any:
    """``value`` if it is of ``kind``, ``default`` if it is None. Raises Refusal naming ``where``."""
    if value is None:
        return default
    numeric = kind in (int, float, (int, float))
    if not isinstance(value, kind) or (numeric and isinstance(value, bool)):
        names = "/".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise Refusal(f"{where}: expected {names}, got {type(value).__name__}")
    return value


def arguments(raw: Any) -> Any:
    """Tool-call arguments from their JSON text; a string that is no JSON stays as it is."""
    if not isinstance(raw, str):
        return {} if raw is None else raw
    try:
        return json.loads(raw) if raw.strip() else {}
    except ValueError:
        return raw


def placeholder(block: Mapping[str, Any]) -> Text:
    """Stands, visibly, for content the policy cannot see. Never a silent drop: it would invent what it did not see."""
    kind = block.get("type", "unknown")
    source = block.get("source")
    media = f" {source['media_type']}" if isinstance(source, dict) and "media_type" in source else ""
    return Text(f"[{kind}{media}: not shown, this model reads text only]")


def merged(parts: list[Part]) -> tuple[Part, ...]:
    """Parts of a message; an empty message has one empty text."""
    return tuple(parts) or (Text(""),)
