"""One conversation, whatever the wire format it came in: what the dialects parse to and what the renderer reads.

Equality is on meaning. Tool arguments are parsed values, ids that a harness mints take no part in it, cache markers and
billing lines are gone. A message is one of four roles; a harness turn that mixes tool results and text becomes several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    text: str


class Thinking(msgspec.Struct, frozen=True, gc=False):
    text: str
    signature: str = ""


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """``call_id`` is minted by the proxy and unique per session; ``arguments`` is the parsed value."""

    call_id: str
    name: str
    arguments: Any


class ToolResult(msgspec.Struct, frozen=True, gc=False):
    call_id: str
    text: str
    is_error: bool = False


Part = Text | Thinking | ToolCall | ToolResult


class Message(msgspec.Struct, frozen=True, gc=False):
    """``role`` is system, user, assistant or tool. A tool message has exactly one ToolResult part."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts joined; thinking and tool calls left out."""
        return "".join(p.text for p in self.parts if isinstance(p, Text | ToolResult))


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A model call's request. A top-level system prompt is the first message, with role system."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    model: str = ""
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: tuple[str, ...] = ()
    thinking: bool | None = None  # None: the template's default
    extra: dict[str, Any] = field(default_factory=dict)  # kept for the dialect that made it, never rendered
