"""What a wire format has to offer the proxy: requests in, turns out, errors in its own form.

    body ─ parse ─▶ Conversation        Reply ─ body ─▶ JSON        Reply ─ emitter ─▶ SSE frames

What of a request is honoured, ignored and refused is data: ``contract``, and one table beside each dialect.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, Tool, ToolCall
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply, Turn

FREE_TEXT = "input"  # a custom tool takes one text; the policy sees it as a parameter of this name


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


@dataclass(frozen=True, slots=True)
class Toolset:
    """A request's tools, with what OpenAI's formats say of some: ``custom`` ones take one text, ``namespaced`` ones
    are members of a namespace and called ``namespace.name``."""

    tools: tuple[Tool, ...] = ()
    custom: tuple[str, ...] = ()
    namespaced: tuple[str, ...] = ()

    def __add__(self, other: Toolset) -> Toolset:
        return Toolset(self.tools + other.tools, self.custom + other.custom, self.namespaced + other.namespaced)


# What the formats call the same thing, which reads the same to the policy in all of them.
_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "document": "file",
    "input_file": "file",
}
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)[;,]")


def _media_type(block: Mapping[str, Any]) -> str:
    """The media type of a block, where it says one; "" otherwise."""
    for held in (block, *(v for v in block.values() if isinstance(v, dict))):
        if isinstance(kind := held.get("media_type"), str):
            return kind
        for value in held.values():
            if isinstance(value, str) and (found := _DATA_URL.match(value)):
                return found[1]
    return ""


class Reading:
    """What was read of a request so far: its messages, and how many blocks became a placeholder."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.placeholders = 0

    def placeholder(self, block: Mapping[str, Any]) -> Text:
        """Stands, visibly, for content the policy cannot see. Never a silent drop: it would invent what it missed."""
        self.placeholders += 1
        kind = str(block.get("type", "unknown"))
        named = " ".join(filter(None, (_KINDS.get(kind, kind), _media_type(block))))
        return Text(f"[{named}: not shown, this model reads text only]")


class Dialect(ABC):
    """One wire format.

    A request is read in parts, so that what is known need not be read again (``proxy.reader``): ``lead`` is what stands
    before the history, ``entry`` is called for each of its entries in order, ``request`` is everything else. An entry
    may add messages to a reading or extend the assistant's turn that is its last message; it sees no more.
    """

    name: str
    history: str  # the field that holds the history

    def parse(self, fields: Mapping[str, Any]) -> Conversation:
        """Read a whole request. Raises Refusal (400) naming the field that is wrong."""
        into = Reading()
        self.lead(fields, into)
        for i, entry in enumerate(self.entries(fields.get(self.history))):
            self.entry(i, entry, into)
        return self.request(fields, into, self.toolset(fields.get("tools")))

    def entries(self, value: Any) -> list[Any]:
        """The history as a list. Raises Refusal when it is none."""
        entries: list[Any] = typed(self.history, value, list, default=[])
        return entries

    @abstractmethod
    def lead(self, fields: Mapping[str, Any], into: Reading) -> None:
        """Read what stands before the history. Raises Refusal."""

    @abstractmethod
    def entry(self, i: int, raw: Any, into: Reading) -> None:
        """Read entry ``i`` of the history. Raises Refusal."""

    @abstractmethod
    def toolset(self, value: Any) -> Toolset:
        """Read the ``tools`` field. Raises Refusal."""

    @abstractmethod
    def request(self, fields: Mapping[str, Any], read: Reading, toolset: Toolset) -> Conversation:
        """The request with its messages as ``read``; looks at no history or tools in ``fields``. Raises Refusal."""

    @abstractmethod
    def body(self, head: Head, reply: Reply) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def emitter(self, head: Head) -> Emitter:
        """A writer for the streamed answer."""

    @abstractmethod
    def error(self, refusal: Refusal) -> dict[str, Any]:
        """An error body."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer to a client that asks how long its prompt is."""
        return {"input_tokens": tokens}

    def refused_stream(self, refusal: Refusal) -> bytes | None:
        """The error as a stream, for a client that reads only streams, if the format knows such errors."""
        return None


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


def free_text_tool(name: str, description: str) -> Toolset:
    """A custom tool, as the policy is shown it."""
    schema = {"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]}
    return Toolset((Tool(name, description, schema),), custom=(name,))


def free_text(head: Head, call: ToolCall) -> str | None:
    """What ``call`` says to a custom tool; None if it is none, or not called as one."""
    if call.name not in head.asked.extra.get("custom", ()) or not isinstance(call.arguments, dict):
        return None
    text = call.arguments.get(FREE_TEXT)
    return text if isinstance(text, str) else None


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


def merged(parts: list[Part]) -> tuple[Part, ...]:
    """Parts of a message; an empty message has one empty text."""
    return tuple(parts) or (Text(""),)
