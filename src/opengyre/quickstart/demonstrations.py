"""Recorded work of the demonstrator, as the harness's own requests and as training sequences.

    draw task -> harness.Agent with the demonstrator for a model -> requests and replies -> one history per leaf

A history is tokenised exactly as the proxy does it at run time: prompts through the ``Renderer``, piece by piece, and a
reply as what the policy would have sampled, with its stop token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from opengyre.proxy.conversation import Conversation, Message, Text, Tool, ToolCall, ToolResult
from opengyre.proxy.render import Renderer
from opengyre.quickstart import check, harness
from opengyre.quickstart.behaviours import Function
from opengyre.quickstart.demonstrator import Demonstrator, Habits, memory_tools
from opengyre.quickstart.tasks import INSTRUCTION, Blueprint

Count = Callable[[Conversation], int]  # tokens of a prompt


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One execution: its histories (each ends with an assistant turn), its calls, the share of functions right."""

    histories: list[Conversation]
    calls: int
    reward: float


def conversation_of(request: dict[str, Any], reply: list[dict[str, Any]] | None = None) -> Conversation:
    """A Messages body of our harness as a conversation, with the reply as its last turn."""
    messages = [Message("system", tuple(Text(b["text"]) for b in request["system"]))]
    turns = [(m["role"], m["content"]) for m in request["messages"]]
    for role, blocks in turns + ([("assistant", reply)] if reply is not None else []):
        if role == "assistant":
            messages.append(Message(role, tuple(_part(b) for b in blocks)))
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                result = ToolResult(block["tool_use_id"], block["content"], bool(block.get("is_error")))
                messages.append(Message("tool", (result,)))
        if texts := tuple(Text(b["text"]) for b in blocks if b["type"] == "text"):
            messages.append(Message("user", texts))
    tools = tuple(Tool(t["name"], t["description"], t["input_schema"]) for t in request["tools"])
    return Conversation(tuple(messages), tools)


def _part(block: dict[str, Any]) -> Text | ToolCall:
    return Text(block["text"]) if block["type"] == "text" else ToolCall(block["id"], block["name"], block["input"])


def demonstrate(blueprint: Blueprint, rng: Random, habits: Habits, count: Count) -> Demonstration:
    """Run the harness in this process, without waiting, with the demonstrator in the policy's place."""
    author = Demonstrator(blueprint, rng, habits)
    tools, files = memory_tools(blueprint, rng)
    recorded: list[Conversation] = []

    def call(request: dict[str, Any]) -> dict[str, Any]:
        reply = author.reply(request)
        recorded.append(conversation_of(request, reply))
        return {"content": reply, "stop_reason": "end_turn", "usage": {"input_tokens": count(recorded[-1])}}

    harness.Agent(call, tools, harness.Limits()).run(INSTRUCTION)
    hidden = blueprint.cases(rng, 8)
    passed = [check.verdict(files.get(m, ""), s, c) for m, fs in hidden.items() for s, c in fs.items()]
    return Demonstration(list(_leaves(recorded)), len(recorded), sum(passed) / len(passed))


def _leaves(recorded: list[Conversation]) -> Iterator[Conversation]:
    """Those that no later one continues."""
    for i, one in enumerate(recorded):
        n = len(one.messages)
        if not any(later.messages[:n] == one.messages for later in recorded[i + 1 :]):
            yield one


def said(message: Message) -> str:
    """An assistant turn as the policy writes it."""
    text = "".join(p.text for p in message.parts if isinstance(p, Text))
    for part in message.parts:
        if isinstance(part, ToolCall):
            call = json.dumps({"name": part.name, "arguments": part.arguments}, ensure_ascii=False)
            text += ("\n" if text else "") + f"<tool_call>\n{call}\n</tool_call>"
    return text


def sequence(history: Conversation, renderer: Renderer) -> tuple[list[int], list[bool]]:
    """(ids, sampled?) of a history, as the proxy would have recorded it."""
    (stop,) = renderer.stop_token_ids
    ids: list[int] = []
    sampled: list[bool] = []
    start = 0
    for i, message in enumerate(history.messages):
        if message.role != "assistant":
            continue
        prompt = renderer.render_tail(Conversation(history.messages[:i], history.tools), start, stop).ids
        reply = [*renderer.encode(said(message)), stop]
        ids += prompt + reply
        sampled += [False] * len(prompt) + [True] * len(reply)
        start = i + 1
    return ids, sampled


def drill(renderer: Renderer, functions: list[Function], rng: Random, habits: Habits) -> tuple[list[int], list[bool]]:
    """A requirements file, the write call for it and the report, without a conversation around them.

    Every third token of it is a copied one, where a history has one in ten: a model learns to copy from these first.
    """
    chosen = {f.name: f for f in rng.sample(functions, rng.randint(2, 8))}.values()
    right = [rng.random() < habits.right[f.behaviour.key] for f in chosen]
    source = "".join(f.definition(right=good) for f, good in zip(chosen, right, strict=True))
    write = said(Message("assistant", (ToolCall("", "write", {"path": "lib.py", "content": source}),)))
    report = "".join(f"{f.signature} {'ok' if good else 'FAIL'}\n" for f, good in zip(chosen, right, strict=True))
    asked = renderer.encode("lib.py\n" + "".join(f"{f.requirement}\n" for f in chosen))
    answer = [token for text in (write, report) for token in renderer.encode(text)]
    return asked + answer, [False] * len(asked) + [True] * len(answer)
