"""OpenAI Responses, without stored state. What is honoured, ignored and refused: ``responses_contract``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.contract import refuse
from opengyre.proxy.dialects.responses_contract import CONTRACT
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply, signature
from opengyre.record.types import Finish


class Responses(Dialect):
    """The dialect of Codex."""

    name = "responses"
    history = "input"

    def lead(self, fields: Mapping[str, Any], into: Reading) -> None:
        """The instructions."""
        if instructions := typed("instructions", fields.get("instructions"), str, default=""):
            _add(into, "system", [Text(instructions)])

    def entries(self, value: Any) -> list[Any]:
        """Input items; a string is one user message."""
        return [{"role": "user", "content": value}] if isinstance(value, str) else super().entries(value)

    def entry(self, i: int, raw: Any, into: Reading) -> None:
        """Gather an item: what the policy said in one turn comes as several."""
        where = f"input[{i}]"
        item = typed(where, raw, dict, default={})
        match item.get("type", "message"):
            case "message":
                _message(where, item, into)
            case "reasoning":
                texts = [*(item.get("content") or []), *([] if item.get("content") else item.get("summary") or [])]
                thought = "\n".join(str(t.get("text", "")) for t in texts if isinstance(t, dict))
                _add(into, "assistant", [Thinking(thought, str(item.get("encrypted_content") or ""))])
            case "function_call":
                value = arguments(item.get("arguments"))
                _add(into, "assistant", [ToolCall(str(item.get("call_id", "")), _full_name(item), value)])
            case "custom_tool_call":
                value = {FREE_TEXT: str(item.get("input", ""))}
                _add(into, "assistant", [ToolCall(str(item.get("call_id", "")), _full_name(item), value)])
            case "function_call_output" | "custom_tool_call_output":
                text = "\n".join(p.text for p in _texts(f"{where}.output", item.get("output"), into))
                _add(into, "tool", [ToolResult(str(item.get("call_id", "")), text)])
            case "item_reference":
                raise Refusal(f"{where}: nothing is stored here; send the item itself")
            case "additional_tools":  # shown as a placeholder, the policy would work without any tool
                raise Refusal(f"{where}: tools belong into tools; Codex puts them there for models it does not know")
            case _:
                _add(into, "user", [into.placeholder(item)])

    def toolset(self, value: Any) -> Toolset:
        """Function and custom tools, and the members of namespaces; others run on the vendor's servers."""
        return _tools(typed("tools", value, list, default=[]))

    def request(self, fields: Mapping[str, Any], read: Reading, toolset: Toolset) -> Conversation:
        """A ``/v1/responses`` request."""
        refuse(CONTRACT, fields)
        effort = typed("reasoning", fields.get("reasoning"), dict, default={}).get("effort")
        max_tokens = typed("max_output_tokens", fields.get("max_output_tokens"), int)
        if max_tokens is not None and max_tokens < 1:
            raise Refusal("max_output_tokens: must be at least 1")
        custom, namespaced = toolset.custom, toolset.namespaced
        return Conversation(
            messages=tuple(read.messages),
            tools=toolset.tools,
            model=typed("model", fields.get("model"), str, default=""),
            stream=typed("stream", fields.get("stream"), bool, default=False),
            max_tokens=max_tokens,
            temperature=typed("temperature", fields.get("temperature"), (int, float)),
            top_p=typed("top_p", fields.get("top_p"), (int, float)),
            thinking=None if effort is None else effort != "none",
            extra={"placeholders": read.placeholders, "custom": custom, "namespaced": namespaced},
        )

    def body(self, head: Head, reply: Reply) -> dict[str, Any]:
        """A ``response`` object."""
        return _response(head, _status(reply), _items(head, reply), reply)

    def emitter(self, head: Head) -> ResponsesEmitter:
        """A writer of response events."""
        return ResponsesEmitter(head)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """OpenAI's error body."""
        return Chat().error(refusal)

    def counted(self, tokens: int) -> dict[str, Any]:
        """A count of input tokens."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def refused_stream(self, refusal: Refusal) -> bytes | None:
        """A prompt that is too long, as response.failed: Codex shortens its history on this event, not on a 400."""
        if refusal.code != "context_length_exceeded":
            return None
        emitter = ResponsesEmitter(Head("refused", Conversation(()), 0))
        return emitter.open() + emitter.fail(refusal)


class ResponsesEmitter:
    """Numbered events: created, one output item after the other, completed (or incomplete)."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._released = Released()
        self._number = -1
        self._index = -1
        self._open: str | None = None  # kind of the item that is open
        self._said = ""  # of the item that is open
        self._items: list[dict[str, Any]] = []

    def open(self) -> bytes:
        """response.created."""
        return self._event("response.created", response=_response(self._head, "in_progress", []))

    def ping(self) -> bytes:
        """response.in_progress again: a comment would not reset the idle limit of Codex."""
        return self._event("response.in_progress", response=_response(self._head, "in_progress", []))

    def delta(self, kind: str, text: str) -> bytes:
        """A piece of reasoning_text or output_text, in an item of its own kind."""
        frames = b""
        if self._open != kind:
            frames = self._finish() + self._begin(kind)
        self._released.add(kind, text)
        self._said += text
        return frames + self._event(f"response.{_TEXT_EVENT[kind]}.delta", **self._place(), delta=text, **_extra(kind))

    def close(self, reply: Reply) -> bytes:
        """The rest of the turn and its end."""
        thinking, text = self._released.rest(reply.turn)
        frames = self.delta("thinking", thinking) if thinking else b""
        frames += self.delta("text", text) if text else b""
        frames += self._finish()
        for call in reply.turn.calls:
            frames += self._call(call)
        if not self._items:  # a turn without items could not come back, and the history would lose it
            frames += self._begin("text") + self._finish()
        status = _status(reply)
        end = "response.completed" if status == "completed" else "response.incomplete"
        return frames + self._event(end, response=_response(self._head, status, self._items, reply))

    def fail(self, refusal: Refusal) -> bytes:
        """response.failed."""
        response = _response(self._head, "failed", [])
        # Codex tries again on the first code, and not on the second.
        code = refusal.code or ("server_error" if refusal.status >= 500 else "invalid_prompt")
        response["error"] = {"code": code, "message": refusal.what}
        return self._event("response.failed", response=response)

    def _begin(self, kind: str) -> bytes:
        self._index += 1
        self._open, self._said = kind, ""
        item = _item(self._head, kind, "", "in_progress")
        frames = self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "text":
            frames += self._event("response.content_part.added", **self._place(), part=_part(""))
        return frames

    def _finish(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        done = f"response.{_TEXT_EVENT[kind]}.done"
        frames = self._event(done, **self._place(kind), text=self._said, **_extra(kind))
        if kind == "text":
            frames += self._event("response.content_part.done", **self._place(kind), part=_part(self._said))
        return frames + self._done(_item(self._head, kind, self._said, "completed"))

    def _call(self, call: ToolCall) -> bytes:
        self._index += 1
        item = _call(self._head, call)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        event = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        at = {"item_id": item["id"], "output_index": self._index}
        added = {**item, field: "", "status": "in_progress"}
        frames = self._event("response.output_item.added", output_index=self._index, item=added)
        frames += self._event(f"response.{event}.delta", **at, delta=item[field])
        frames += self._event(f"response.{event}.done", **at, **{field: item[field]})
        return frames + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=self._index, item=item)

    def _place(self, kind: str | None = None) -> dict[str, Any]:
        item = f"{_PREFIX[kind or self._open or 'text']}_{self._head.call_id}"
        return {"item_id": item, "output_index": self._index, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        data = compact({"type": name, "sequence_number": self._number, **fields})
        return f"event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def _add(into: Reading, role: str, parts: list[Part]) -> None:
    """Add a message, or to the assistant's turn that is being read."""
    if role == "assistant" and into.messages and into.messages[-1].role == "assistant":
        parts = [*into.messages.pop().parts, *parts]
    into.messages.append(Message(role, tuple(parts) if role == "assistant" else merged(parts)))


def _message(where: str, item: dict[str, Any], into: Reading) -> None:
    role = item.get("role")
    texts: list[Part] = [*_texts(f"{where}.content", item.get("content"), into)]
    match role:
        case "system" | "developer":
            _add(into, "system", texts)
        case "user":
            _add(into, "user", texts)
        case "assistant":
            _add(into, "assistant", [t for t in texts if isinstance(t, Text) and t.text])
        case _:
            raise Refusal(f"{where}.role: {role!r} is none of system, developer, user, assistant")


def _texts(where: str, content: Any, into: Reading) -> list[Text]:
    if isinstance(content, str):
        return [Text(content)]
    texts = []
    for i, raw in enumerate(typed(where, content, list, default=[])):
        block = typed(f"{where}[{i}]", raw, dict, default={})
        if block.get("type") in ("input_text", "output_text", "text", "refusal"):
            texts.append(Text(typed(f"{where}[{i}].text", block.get("text", block.get("refusal")), str, default="")))
        else:
            texts.append(into.placeholder(block))
    return texts


def _full_name(item: dict[str, Any]) -> str:
    """A member of a namespace is called ``namespace.name``."""
    return ".".join(str(n) for n in (item.get("namespace"), item.get("name", "")) if n)


def _tools(raw: list[Any], where: str = "tools", namespace: str = "") -> Toolset:
    found = Toolset()
    for i, entry in enumerate(raw):
        at = f"{where}[{i}]"
        tool = typed(at, entry, dict, default={})
        name = typed(f"{at}.name", tool.get("name"), str, default="")
        full = f"{namespace}.{name}" if namespace else name
        description = str(tool.get("description") or "")
        match tool.get("type", "function"):
            case "function":
                parameters = typed(f"{at}.parameters", tool.get("parameters"), dict, default={})
                found += Toolset((Tool(full, description, parameters),))
            case "custom":
                found += free_text_tool(full, description)
            case "namespace" if not namespace:
                members = _tools(typed(f"{at}.tools", tool.get("tools"), list, default=[]), f"{at}.tools", name)
                found += replace(members, namespaced=tuple(member.name for member in members.tools))
    return found


_TEXT_EVENT = {"thinking": "reasoning_text", "text": "output_text"}
_PREFIX = {"thinking": "rs", "text": "msg"}


def _extra(kind: str) -> dict[str, Any]:
    """A field without which OpenAI's own client drops a text event."""
    return {"logprobs": []} if kind == "text" else {}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _item(head: Head, kind: str, text: str, status: str) -> dict[str, Any]:
    if kind == "thinking":
        content = [{"type": "reasoning_text", "text": text}] if text else []
        signed = signature(head.call_id)
        return {
            "type": "reasoning",
            "id": f"rs_{head.call_id}",
            "summary": [],
            "content": content,
            "encrypted_content": signed,
        }
    content = [_part(text)] if text or status == "completed" else []
    return {"type": "message", "id": f"msg_{head.call_id}", "role": "assistant", "status": status, "content": content}


def _call(head: Head, call: ToolCall) -> dict[str, Any]:
    item: dict[str, Any] = {"id": f"fc_{call.call_id}", "call_id": call.call_id, "status": "completed"}
    item["name"] = call.name
    if call.name in head.asked.extra.get("namespaced", ()):
        item["namespace"], _, item["name"] = call.name.rpartition(".")
    if (text := free_text(head, call)) is not None:
        return {"type": "custom_tool_call", **item, "input": text}
    return {"type": "function_call", **item, "arguments": compact(call.arguments)}


def _items(head: Head, reply: Reply) -> list[dict[str, Any]]:
    thinking, text = Released().rest(reply.turn)
    items = [_item(head, kind, said, "completed") for kind, said in (("thinking", thinking), ("text", text)) if said]
    items += [_call(head, call) for call in reply.turn.calls]
    return items or [_item(head, "text", "", "completed")]


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish is Finish.LENGTH else "completed"


def _response(head: Head, status: str, output: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
    usage = None
    if reply is not None:
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        }
    return {
        "id": f"resp_{head.call_id}",
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }
