"""How a client of each format keeps its history: for tests that hold the same conversation in all of them.

``turn`` is what the client keeps of an answer, ``results`` what it adds when the tools have run; both are lists of
entries of ``messages`` (or ``input``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]


class MessagesClient:
    path, history = "/v1/messages", "messages"

    def body(self, entries: list[Entry], tools: Sequence[str] = (), system: str = "S", **more: Any) -> Entry:
        declared = [{"name": n, "description": n, "input_schema": {"type": "object"}} for n in tools]
        return {"model": "m", "max_tokens": 500, "system": system, "tools": declared, "messages": entries, **more}

    def says(self, text: str, role: str = "user") -> Entry:
        return {"role": role, "content": text}

    def turn(self, answer: Entry) -> list[Entry]:
        return [{"role": "assistant", "content": answer["content"]}]

    def calls(self, turn: list[Entry]) -> list[str]:
        blocks = [b for entry in turn if isinstance(entry["content"], list) for b in entry["content"]]
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def results(self, results: list[tuple[str, str]]) -> list[Entry]:
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results]
        return [{"role": "user", "content": blocks}] if blocks else []


class ChatClient:
    path, history = "/v1/chat/completions", "messages"

    def body(self, entries: list[Entry], tools: Sequence[str] = (), system: str = "S", **more: Any) -> Entry:
        functions = [{"name": n, "description": n, "parameters": {"type": "object"}} for n in tools]
        declared = [{"type": "function", "function": f} for f in functions]
        messages = [{"role": "system", "content": system}, *entries]
        return {"model": "m", "max_tokens": 500, "tools": declared, "messages": messages, **more}

    def says(self, text: str, role: str = "user") -> Entry:
        return {"role": role, "content": text}

    def turn(self, answer: Entry) -> list[Entry]:
        return [answer["choices"][0]["message"]]

    def calls(self, turn: list[Entry]) -> list[str]:
        return [call["id"] for entry in turn for call in entry.get("tool_calls") or []]

    def results(self, results: list[tuple[str, str]]) -> list[Entry]:
        return [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]


class ResponsesClient:
    path, history = "/v1/responses", "input"

    def body(self, entries: list[Entry], tools: Sequence[str] = (), system: str = "S", **more: Any) -> Entry:
        declared = [{"type": "function", "name": n, "description": n, "parameters": {"type": "object"}} for n in tools]
        return {
            "model": "m",
            "max_output_tokens": 500,
            "instructions": system,
            "tools": declared,
            "input": entries,
        } | more

    def says(self, text: str, role: str = "user") -> Entry:
        return {"role": role, "content": text}

    def turn(self, answer: Entry) -> list[Entry]:
        return list(answer["output"])

    def calls(self, turn: list[Entry]) -> list[str]:
        return [item["call_id"] for item in turn if item["type"].endswith("_call")]

    def results(self, results: list[tuple[str, str]]) -> list[Entry]:
        return [{"type": "function_call_output", "call_id": i, "output": text} for i, text in results]


CLIENTS = {"messages": MessagesClient(), "chat": ChatClient(), "responses": ResponsesClient()}


def call(name: str, arguments: str | Entry) -> str:
    """A tool call as a policy samples it; ``arguments`` as a string go in as they are."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {raw}}}\n</tool_call>'
