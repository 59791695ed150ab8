"""OpenAI Chat Completions. What is honoured, ignored and refused: ``chat_contract``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.dialects.base import (
    FREE_TEXT,
    Dialect,
    Head,
    Reading,
    Released,
    Toolset,
    arguments,
    compact,
    free_text,
    free_text_tool,
    merged,
    typed,
)
from opengyre.proxy.dialects.chat_contract import CONTRACT
from opengyre.proxy.dialects.contract import refuse
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply
from opengyre.record.types import Finish

_FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.STOP_SEQUENCE: "stop",
    Finish.LENGTH: "length",
    Finish.ABORTED: "stop",
}


class Chat(Dialect):
    """The dialect of opencode, Qwen Code, mini-swe-agent and most others."""

    name = "chat"
    history = "messages"

    def lead(self, fields: Mapping[str, Any], into: Reading) -> None:
        """Nothing stands before the messages."""

    def entry(self, i: int, raw: Any, into: Reading) -> None:
        """One wire message is one of ours."""
        where = f"messages[{i}]"
        message = typed(where, raw, dict, default={})
        role, content = message.get("role"), message.get("content")
        match role:
            case "system" | "developer":
                into.messages.append(Message("system", merged(_parts(where, content, into))))
            case "user":
                into.messages.append(Message("user", merged(_parts(where, content, into))))
            case "tool":
                text = "\n".join(p.text for p in _parts(where, content, into) if isinstance(p, Text))
                into.messages.append(Message("tool", (ToolResult(str(message.get("tool_call_id", "")), text),)))
            case "assistant":
                into.messages.append(Message("assistant", tuple(_said(where, message, into))))
            case _:
                raise Refusal(f"{where}.role: {role!r} is none of system, developer, user, assistant, tool")

    def toolset(self, value: Any) -> Toolset:
        """Function and custom tools; others run on the vendor's servers."""
        return sum((_tool(f"tools[{i}]", t) for i, t in enumerate(typed("tools", value, list, default=[]))), Toolset())

    def request(self, fields: Mapping[str, Any], read: Reading, toolset: Toolset) -> Conversation:
        """A ``/v1/chat/completions`` request."""
        refuse(CONTRACT, fields)
        options = typed("stream_options", fields.get("stream_options"), dict, default={})
        return Conversation(
            messages=tuple(read.messages),
            tools=toolset.tools,
            model=typed("model", fields.get("model"), str, default=""),
            stream=typed("stream", fields.get("stream"), bool, default=False),
            max_tokens=_max_tokens(fields),
            temperature=typed("temperature", fields.get("temperature"), (int, float)),
            top_p=typed("top_p", fields.get("top_p"), (int, float)),
            stop_sequences=_stop(fields.get("stop")),
            thinking=_thinking(fields),
            extra={
                "placeholders": read.placeholders,
                "custom": toolset.custom,
                "include_usage": bool(options.get("include_usage")),
            },
        )

    def body(self, head: Head, reply: Reply) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        thinking, text = Released().rest(reply.turn)
        message["content"] = text or None
        if thinking:
            message["reasoning_content"] = thinking
        if reply.turn.calls:
            message["tool_calls"] = [_call(head, call) for call in reply.turn.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
        return {**_frame(head, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def emitter(self, head: Head) -> ChatEmitter:
        """A writer of chunks."""
        return ChatEmitter(head)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """OpenAI's error body."""
        return {"error": {"message": refusal.what, "type": refusal.kind, "param": refusal.param, "code": refusal.code}}


class ChatEmitter:
    """Chunks, then [DONE]."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._released = Released()

    def open(self) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def ping(self) -> bytes:
        """A comment, which every event-stream parser skips."""
        return b": ping\n\n"

    def delta(self, kind: str, text: str) -> bytes:
        """A piece of reasoning_content or content."""
        self._released.add(kind, text)
        return self._chunk({"reasoning_content" if kind == "thinking" else "content": text})

    def close(self, reply: Reply) -> bytes:
        """The rest of the turn, the finish reason, usage if asked for, and [DONE]."""
        thinking, text = self._released.rest(reply.turn)
        frames = self.delta("thinking", thinking) if thinking else b""
        frames += self.delta("text", text) if text else b""
        for i, call in enumerate(reply.turn.calls):
            frames += self._chunk({"tool_calls": [{"index": i, **_call(self._head, call)}]})
        frames += self._chunk({}, _finish_reason(reply))
        if self._head.asked.extra.get("include_usage"):
            frames += _data({**_frame(self._head, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)})
        return frames + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        """An error object in the stream, as OpenAI-compatible servers send it."""
        return _data(Chat().error(refusal))

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _data({**_frame(self._head, "chat.completion.chunk"), "choices": [choice]})


def _said(where: str, raw: dict[str, Any], into: Reading) -> list[Part]:
    parts: list[Part] = []
    thought = raw.get("reasoning_content") or raw.get("reasoning")
    if thought := typed(f"{where}.reasoning_content", thought, str, default=""):
        parts.append(Thinking(thought))
    parts += [p for p in _parts(where, raw.get("content"), into) if not (isinstance(p, Text) and not p.text)]
    for i, call in enumerate(typed(f"{where}.tool_calls", raw.get("tool_calls"), list, default=[])):
        at = f"{where}.tool_calls[{i}]"
        call = typed(at, call, dict, default={})
        if isinstance(custom := call.get("custom"), dict):
            name, value = custom.get("name", ""), {FREE_TEXT: str(custom.get("input", ""))}
        else:
            function = typed(f"{at}.function", call.get("function"), dict, default={})
            name, value = function.get("name", ""), arguments(function.get("arguments"))
        parts.append(ToolCall(str(call.get("id", "")), str(name), value))
    return parts


def _parts(where: str, content: Any, into: Reading) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    for i, raw in enumerate(typed(f"{where}.content", content, list, default=[])):
        block = typed(f"{where}.content[{i}]", raw, dict, default={})
        if block.get("type") in ("text", "refusal"):
            text = block.get("text", block.get("refusal"))
            parts.append(Text(typed(f"{where}.content[{i}].text", text, str, default="")))
        else:
            parts.append(into.placeholder(block))
    return parts


def _tool(where: str, raw: Any) -> Toolset:
    tool = typed(where, raw, dict, default={})
    for kind in ("function", "custom"):
        if (declared := typed(f"{where}.{kind}", tool.get(kind), dict)) is not None:
            name = typed(f"{where}.{kind}.name", declared.get("name"), str, default="")
            description = str(declared.get("description") or "")
            if kind == "custom":
                return free_text_tool(name, description)
            parameters = typed(f"{where}.function.parameters", declared.get("parameters"), dict, default={})
            return Toolset((Tool(name, description, parameters),))
    return Toolset()  # a tool that runs on the vendor's servers


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = typed(name, body.get(name), int)
        if value is not None:
            if value < 1:
                raise Refusal(f"{name}: must be at least 1")
            return value
    return None


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(typed(f"stop[{i}]", s, str, default="") for i, s in enumerate(typed("stop", value, list, default=[])))


def _thinking(body: Mapping[str, Any]) -> bool | None:
    options = typed("chat_template_kwargs", body.get("chat_template_kwargs"), dict, default={})
    if isinstance(options.get("enable_thinking"), bool):
        return bool(options["enable_thinking"])
    effort = body.get("reasoning_effort")
    return None if effort is None else effort != "none"


def _call(head: Head, call: ToolCall) -> dict[str, Any]:
    if (text := free_text(head, call)) is not None:
        return {"id": call.call_id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": compact(call.arguments)},
    }


def _finish_reason(reply: Reply) -> str:
    if reply.finish is Finish.STOP and reply.turn.calls:
        return "tool_calls"
    return _FINISH_REASONS[reply.finish]


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.sampled_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.sampled_tokens, "total_tokens": total}


def _frame(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.call_id}", "object": kind, "created": head.created_s, "model": head.model}


def _data(value: dict[str, Any]) -> bytes:
    return f"data: {compact(value)}\n\n".encode("utf-8", "replace")
