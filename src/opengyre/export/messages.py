"""The conversation along a path, in the form most tools read. For people: tokens are the record."""

from __future__ import annotations

import json
from typing import Any

from opengyre.record.store import Store
from opengyre.record.tree import Tree


def messages_of(store: Store, tree: Tree, execution_id: str, leaf: int) -> list[dict[str, Any]]:
    """All messages of the call that ends at ``leaf``, the reply included.

    A call is stored with its own new messages; those before it are what the call it continues had at that point.
    """
    calls = {call.meta.call_id: call for call in tree.calls()}
    chain, call = [], tree.call_of(leaf)
    while True:
        chain.append(call)
        before = calls.get(call.attach.via)
        if before is None or not call.attach.n_messages:
            break
        call = before
    messages: list[dict[str, Any]] = []
    for call in reversed(chain):
        own = store.messages(execution_id, call.meta.call_id) or []
        messages = messages[: call.attach.n_messages] + own
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A stored message as OpenAI-style chat."""
    parts = message.get("parts", [])
    texts = [part[kind] for part in parts for kind in ("text", "result") if kind in part]
    thoughts = [part["thinking"] for part in parts if part.get("thinking")]
    calls = [
        {"type": "function", "function": {"name": part["call"], "arguments": json.dumps(part.get("arguments"))}}
        for part in parts
        if "call" in part
    ]
    return {
        "role": message["role"],
        "content": "".join(texts),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }
