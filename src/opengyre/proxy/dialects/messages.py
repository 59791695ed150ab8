"""Anthropic Messages. What is honoured, ignored and refused: ``messages_contract``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opengyre.proxy.conversation import (
    Conversation,
    Message,
    Part,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from opengyre.proxy.dialects.base import Dialect, Head, Reading, Released, Toolset, compact, merged, typed
from opengyre.proxy.dialects.contract import refuse
from opengyre.proxy.dialects.messages_contract import CONTRACT, NO_THREADS
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply, signature
from opengyre.record.types import Finish

BILLING = "x-anthropic-billing-header:"  # its value changes within a conversation and would fork every history
_STOP_REASONS = {
    Finish.STOP: "end_turn",
    Finish.STOP_SEQUENCE: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.ABORTED: "end_turn",
}


class Messages(Dialect):
    """The dialect of Claude Code and everything built on Anthropic's SDKs."""

    name = "messages"
    history = "messages"

    def lead(self, fields: Mapping[str, Any], into: Reading) -> None:
        """The top-level system prompt, without billing lines; nothing if nothing is left."""
        parts = [p for p in _texts("system", fields.get("system"), into) if not p.text.lstrip().startswith(BILLING)]
        if parts:
            into.messages.append(Message("system", merged([*parts])))

    def entry(self, i: int, raw: Any, into: Reading) -> None:
        """A wire message as one or several of ours: each tool result is a message."""
        where = f"messages.{i}"
        message = typed(where, raw, dict, default={})
        role, content = message.get("role"), message.get("content")
        match role:
            case "assistant":
                into.messages.append(Message("assistant", tuple(_said(where, content, into))))
            case "system":
                into.messages.append(Message("system", merged([*_texts(where, content, into)])))
            case "user":
                into.messages += _user(where, content, into)
            case _:
                raise Refusal(f"{where}.role: {role!r} is none of user, assistant, system")

    def toolset(self, value: Any) -> Toolset:
        """Tools with an input_schema; others run on Anthropic's servers."""
        return Toolset(tuple(_tools(typed("tools", value, list, default=[]))))

    def request(self, fields: Mapping[str, Any], read: Reading, toolset: Toolset) -> Conversation:
        """A ``/v1/messages`` or ``count_tokens`` request."""
        refuse(CONTRACT, fields)
        thinking = typed("thinking", fields.get("thinking"), dict, default={}).get("type")
        max_tokens = typed("max_tokens", fields.get("max_tokens"), int)
        if max_tokens is not None and max_tokens < 1:
            raise Refusal("max_tokens: must be at least 1")
        return Conversation(
            messages=tuple(read.messages),
            tools=toolset.tools,
            model=typed("model", fields.get("model"), str, default=""),
            stream=typed("stream", fields.get("stream"), bool, default=False),
            max_tokens=max_tokens,
            temperature=typed("temperature", fields.get("temperature"), (int, float)),
            top_p=typed("top_p", fields.get("top_p"), (int, float)),
            top_k=typed("top_k", fields.get("top_k"), int),
            stop_sequences=_strings("stop_sequences", fields.get("stop_sequences")),
            thinking=None if thinking is None else thinking != "disabled",
            extra={"placeholders": read.placeholders},
        )

    def body(self, head: Head, reply: Reply) -> dict[str, Any]:
        """A ``message`` object. ``model`` is the requested name: clients drop signed thinking of any other."""
        return {
            **_opening(head),
            "content": [_block(part, head.call_id) for part in reply.turn.parts],
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.turn.stop_sequence,
            "usage": _usage(reply.prompt_tokens, reply.sampled_tokens),
        }

    def emitter(self, head: Head) -> MessagesEmitter:
        """A writer of message events."""
        return MessagesEmitter(head)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Anthropic's error body."""
        error: dict[str, Any] = {"type": refusal.kind, "message": refusal.what}
        if refusal.code == NO_THREADS:
            error["details"] = {"error_code": refusal.code}
        return {"type": "error", "error": error}


class MessagesEmitter:
    """message_start, blocks with rising indices, message_delta, message_stop."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._released = Released()
        self._index = -1
        self._open: str | None = None  # kind of the block that is open

    def open(self) -> bytes:
        """message_start, with the true prompt length: it is what clients decide on compaction by."""
        return _event("message_start", message=_opening(self._head))

    def ping(self) -> bytes:
        """Anthropic's own keep-alive."""
        return _event("ping")

    def delta(self, kind: str, text: str) -> bytes:
        """A thinking_delta or text_delta, in a block of its own kind."""
        self._released.add(kind, text)
        frames = b""
        if self._open != kind:
            frames = self._stop() + self._start(kind, {"type": kind, kind: ""})
        return frames + self._delta(f"{kind}_delta", **{kind: text})

    def close(self, reply: Reply) -> bytes:
        """The rest of the turn and its end."""
        thinking, text = self._released.rest(reply.turn)
        frames = self.delta("thinking", thinking) if thinking else b""
        frames += self.delta("text", text) if text else b""
        frames += self._stop()
        for call in reply.turn.calls:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            frames += self._start("tool_use", block)
            frames += self._delta("input_json_delta", partial_json=compact(call.arguments))
            frames += self._stop()
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.turn.stop_sequence}
        frames += _event("message_delta", delta=delta, usage={"output_tokens": reply.sampled_tokens})
        return frames + _event("message_stop")

    def fail(self, refusal: Refusal) -> bytes:
        """An error event."""
        return _event("error", error={"type": refusal.kind, "message": refusal.what})

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        if kind == "thinking":
            block["signature"] = ""
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature_delta", signature=signature(self._head.call_id))
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _user(where: str, content: Any, into: Reading) -> list[Message]:
    messages: list[Message] = []
    parts: list[Part] = []
    for block in _blocks(where, content):
        if block.get("type") == "tool_result":
            if parts:
                messages.append(Message("user", tuple(parts)))
                parts = []
            text = "\n".join(p.text for p in _texts(f"{where}.tool_result", block.get("content"), into))
            result = ToolResult(str(block.get("tool_use_id", "")), text, bool(block.get("is_error", False)))
            messages.append(Message("tool", (result,)))
        else:
            parts.append(_text(where, block, into))
    if parts or not messages:
        messages.append(Message("user", merged(parts)))
    return messages


def _said(where: str, content: Any, into: Reading) -> list[Part]:
    parts: list[Part] = []
    for block in _blocks(where, content):
        match block.get("type"):
            case "thinking":
                parts.append(Thinking(str(block.get("thinking", "")), str(block.get("signature", ""))))
            case "redacted_thinking":
                parts.append(Thinking("", str(block.get("data", ""))))
            case "tool_use":
                parts.append(ToolCall(str(block.get("id", "")), str(block.get("name", "")), block.get("input", {})))
            case _:
                text = _text(where, block, into)
                parts += [text] if text.text else []  # an empty turn has no part, as when it was sampled
    return parts


def _texts(where: str, content: Any, into: Reading) -> list[Text]:
    return [_text(where, block, into) for block in _blocks(where, content)]


def _text(where: str, block: dict[str, Any], into: Reading) -> Text:
    if block.get("type") == "text":
        return Text(typed(f"{where}.text", block.get("text"), str, default=""))
    return into.placeholder(block)


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    """Content is a string, which is one text block, or a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = typed(f"{where}.content", content, list, default=[])
    return [typed(f"{where}.content.{i}", block, dict, default={}) for i, block in enumerate(blocks)]


def _tools(raw: list[Any]) -> list[Tool]:
    tools = []
    for i, tool in enumerate(raw):
        tool = typed(f"tools.{i}", tool, dict, default={})
        if isinstance(tool.get("input_schema"), dict):  # others run on Anthropic's servers
            name = typed(f"tools.{i}.name", tool.get("name"), str, default="")
            tools.append(Tool(name, str(tool.get("description") or ""), tool["input_schema"]))
    return tools


def _strings(where: str, value: Any) -> tuple[str, ...]:
    return tuple(typed(f"{where}.{i}", s, str, default="") for i, s in enumerate(typed(where, value, list, default=[])))


def _opening(head: Head) -> dict[str, Any]:
    return {
        "id": f"msg_{head.call_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(head.prompt_tokens, 0),
    }


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    """All prompt tokens are input tokens: what an engine had cached is our business, and cells come and go."""
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sampled,
    }


def _block(part: Part, call_id: str) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Thinking(text, _):
            return {"type": "thinking", "thinking": text, "signature": signature(call_id)}
        case ToolCall(tool_id, name, arguments):
            return {"type": "tool_use", "id": tool_id, "name": name, "input": arguments}
    raise TypeError(f"a turn cannot hold a {type(part).__name__}")


def _stop_reason(reply: Reply) -> str:
    if reply.finish is Finish.STOP and reply.turn.calls:
        return "tool_use"
    return _STOP_REASONS[reply.finish]


def _event(name: str, **fields: Any) -> bytes:
    # The event line is needed: clients take a stream of data lines alone for an empty one.
    return f"event: {name}\ndata: {compact({'type': name, **fields})}\n\n".encode("utf-8", "replace")
