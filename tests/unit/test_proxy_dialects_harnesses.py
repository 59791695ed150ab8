"""What the requests of real harnesses mean: captured bodies (long strings cut) and the conversations read from them.

One line per message, so that a difference names the message. ``pytest --update-golden`` rewrites the conversations.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from msgspec import structs

from opengyre.proxy.conversation import Conversation
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.dialects.responses import Responses

GOLDEN = Path(__file__).parent.parent / "golden" / "harness"
DIALECTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}
REQUESTS = sorted(p for kind in DIALECTS for p in GOLDEN.glob(f"*/*.{kind}.json"))


def read(path: Path) -> Conversation:
    return DIALECTS[path.suffixes[0][1:]].parse(json.loads(path.read_text()))


def lines(conversation: Conversation) -> str:
    """A conversation, one line each for its options, its tools and every message."""
    options = {k: v for k, v in asdict(conversation).items() if k not in ("messages", "tools") and v is not None}
    rows = [options, {"tools": {t.name: list(t.parameters.get("properties", {})) for t in conversation.tools}}]
    for message in conversation.messages:
        parts = [
            {type(p).__name__: {k: v for k, v in structs.asdict(p).items() if v not in ("", False)}}
            for p in message.parts
        ]
        rows.append({message.role: parts})
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"


@pytest.mark.parametrize("path", REQUESTS, ids=[f"{p.parent.name}-{p.name.removesuffix('.json')}" for p in REQUESTS])
def test_what_a_request_means(path, golden):
    golden(path.parent / f"{path.name.split('.')[0]}.conversation.txt", lines(read(path)))


@pytest.mark.parametrize(
    ("harness", "earlier", "later"),
    [
        ("claude_code", "first", "second"),
        ("claude_code", "system_refused", "system_refused_next"),
        ("claude_code", "subagent", "subagent_next"),
        ("opencode", "first", "second"),
        ("codex", "first", "second"),
        ("qwen_code", "first", "second"),
        ("mini_swe_agent", "first", "second"),
    ],
)
def test_a_later_request_extends_an_earlier_one(harness, earlier, later):
    """Byte positions, cache markers, billing lines and content forms change between them; the meaning does not."""
    (a,), (b,) = (list(GOLDEN.glob(f"{harness}/{name}.[mcr]*.json")) for name in (earlier, later))
    before, after = read(a), read(b)
    assert after.messages[: len(before.messages)] == before.messages and len(after.messages) > len(before.messages)
    assert after.tools == before.tools
