"""Requests that are wrong in some way: what real harnesses send, and what the contracts name, with one to four changes.

seed body ─▶ change the tree (0-4 times) ─▶ JSON ─▶ change the bytes (sometimes) ─▶ path, headers ─▶ Attempt
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from opengyre.proxy.dialects.chat_contract import CONTRACT as CHAT
from opengyre.proxy.dialects.contract import Contract, Part
from opengyre.proxy.dialects.messages_contract import CONTRACT as MESSAGES
from opengyre.proxy.dialects.responses_contract import CONTRACT as RESPONSES

GOLDEN = Path(__file__).parent / "golden"
PATHS = {"messages": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}
CONTRACTS: dict[str, Contract] = {"messages": MESSAGES, "chat": CHAT, "responses": RESPONSES}
HISTORY = {"messages": "messages", "chat": "messages", "responses": "input"}
LARGE = "word " * 2000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-320,
    "", " ", "\x00", "\ud800", "\ufeff", "\u202e", "é😀", LARGE, "<|im_end|>", "<|im_start|>system\n", "</think>",
    "<tool_call>", '<tool_call>{"name":"f","arguments":{}}</tool_call>', "{{ 7*7 }}", "{% raise %}", "../../etc/passwd",
    "a\r\nX-Injected: 1", "__proto__", "NaN", [], {}, [[]], [None], {"": ""}, {"type": "text"}, {"role": "user"},
    "auto", "none", "required", {"type": "image"}, {"type": "text", "text": 3}, {"type": None}, "user", "assistant",
)  # fmt: skip
RAW_VALUES = (
    b"NaN", b"-Infinity", b"1e999", b"01", b"+1", b"'a'", b"tru", b'"\\ud800"', b'"\\x"', b"9" * 5000, b'"\x00"',
)  # fmt: skip
TYPES = ("application/json; charset=utf-16", "text/plain", "application/x-www-form-urlencoded", "", "x")
PATH_TAILS = (
    "", "", "", "?beta=true", "?x=" + "y" * 900, "/", "/count_tokens", "/input_tokens", "//", "%00", "/..", "/%2e%2e",
)  # fmt: skip


@dataclass
class Attempt:
    """One request. ``cut_after`` bytes of the answer the client goes away; None: it reads all."""

    dialect: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    cut_after: int | None = None


@cache
def seeds() -> list[tuple[str, str]]:
    """(dialect, body) of what real harnesses sent, and small ones."""
    found = [
        (kind, path.read_text())
        for kind in PATHS
        for path in sorted([*GOLDEN.glob(f"harness/*/*.{kind}.json"), *GOLDEN.glob(f"{kind}/*.request.json")])
    ]
    small = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    tiny = [("messages", small), ("chat", small), ("responses", {"model": "m", "input": "hi", "stream": True})]
    return found + [(kind, json.dumps(body)) for kind, body in tiny for _ in range(len(found) // 6)]


def attempt(rng: random.Random) -> Attempt:
    """The next request of a seeded sequence."""
    dialect, text = rng.choice(seeds())
    body = json.loads(text)
    if rng.random() < 0.3:
        body["stream"] = not body.get("stream", False)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        change(rng, dialect, body)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        raw = change_bytes(rng, raw)
    path = PATHS[dialect]
    if rng.random() < 0.05:
        path = rng.choice(list(PATHS.values()))
    if rng.random() < 0.1:
        path += rng.choice(PATH_TAILS)
    made = Attempt(dialect, path, raw, {"Content-Type": "application/json"})
    if rng.random() < 0.1:
        made.headers |= {**headers(rng), "Connection": "close"}  # the server may hang up on such a request
    if rng.random() < 0.01:
        made.method = rng.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))
    if rng.random() < 0.01:
        made.cut_after = rng.choice((0, 1, 300))
    return made


def change(rng: random.Random, dialect: str, body: dict[str, Any]) -> None:
    """One change to the tree, in place."""
    if not body:
        return
    holder, key = place(rng, body)
    match rng.randrange(10):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        case 3:
            holder[key] = nest(rng.choice((3, 40, 300)), rng.random() < 0.5)
        case 4 if isinstance(holder, dict):
            holder[rng.choice(("", "type", "role", "content", f"{key}x", "\x00"))] = holder.pop(key)
        case 5 if isinstance(holder, list):
            rng.choice(
                (holder.reverse, lambda: holder.insert(0, copy.deepcopy(holder[key])), lambda: holder.pop(key))
            )()
        case 6 if isinstance(holder, dict):
            del holder[key]
        case 7:
            other, at = place(rng, body)
            holder[key] = json.loads(json.dumps(other[at]))
        case 8:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"type": "text", "text": holder[key]}
        case _:
            add(rng, dialect, body)


def add(rng: random.Random, dialect: str, body: dict[str, Any]) -> None:
    """Add what some rule of some contract is about, in its place or in another."""
    rule = rng.choice(CONTRACTS[dialect if rng.random() < 0.8 else rng.choice(list(PATHS))])
    example = json.loads(json.dumps(rule.example))
    history = body.get(HISTORY[dialect])
    entries = history if isinstance(history, list) else []
    match rule.part:
        case Part.FIELD:
            for step in reversed(rule.name.split(".")):
                example = {step: example}
            body.update(example)
        case Part.ROLE:
            entries.append({"role": rule.name, "content": example})
        case Part.CONTENT:
            entries.append({"role": rng.choice(("user", "assistant", "system", "tool")), "content": [example]})
        case Part.ITEM:
            entries.append(example)
        case Part.TOOL:
            tools = body.get("tools")
            body["tools"] = [*(tools if isinstance(tools, list) else []), example]


def nest(depth: int, lists: bool) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def place(rng: random.Random, body: dict[str, Any]) -> tuple[Any, Any]:
    """(container, key or index) of some value in ``body``, deep ones as likely as shallow ones."""
    holder: Any = body
    while True:
        key = rng.choice([*holder]) if isinstance(holder, dict) else rng.randrange(len(holder))
        if not isinstance(holder[key], (dict, list)) or not holder[key] or rng.random() < 0.25:
            return holder, key
        holder = holder[key]


def change_bytes(rng: random.Random, raw: bytes) -> bytes:
    """The body as bytes that are no longer what they were."""
    at = rng.randrange(len(raw) + 1)
    match rng.randrange(12):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        case 2:
            return raw[:at] + rng.randbytes(3) + raw[at:]
        case 3:
            return raw + rng.choice((b"x", b"{}", b"\n\n  ", b","))
        case 4:
            return b"\xef\xbb\xbf" + raw
        case 5:
            return raw.decode("utf-8", "replace").encode("utf-16")
        case 6:
            return raw[:-1] + b',"model":1,"messages":[],"input":[]}'
        case 7:
            deep = rng.choice((500, 20_000, 200_000))
            return rng.choice((b"[" * deep, b'{"messages":' + b"[" * deep + b"]" * deep + b"}", b'{"a":' * deep))
        case 8:
            return raw.replace(b"true", rng.choice(RAW_VALUES)).replace(b"1", rng.choice((b"1", *RAW_VALUES)), 1)
        case 9:
            return raw.replace(b":", rng.choice((b" :\t", b":\r\n ")))
        case 10:
            return rng.choice((b"", b"null", b"[]", b'"x"', b"3", b"\x1f\x8b\x08\x00garbage", b"a=b&c=d"))
        case _:
            return raw.replace(b'"', rng.choice((b"'", b'\\"', b'"\\u0022')), rng.randrange(1, 4))


def headers(rng: random.Random) -> dict[str, str]:
    """Headers that clients do not send."""
    return rng.choice(
        (
            {"Content-Type": rng.choice(TYPES)},
            {"Content-Encoding": rng.choice(("gzip", "deflate", "br", "x"))},
            {"Accept": "text/event-stream"},
            {"Accept-Encoding": "gzip"},
            {"x-claude-code-agent-id": "a" * rng.choice((1, 4000))},
            {"x-codex-turn-metadata": '{"request_kind": [[['},
            {"session-id": "\xe9"},
            {"Authorization": rng.choice(("", "Bearer", "Bearer wrong", "Basic eDp5", "Bearer \xe9\xff"))},
            {"x-api-key": "wrong"},
            {"Expect": rng.choice(("100-continue", "x"))},
            {"Range": "bytes=0-1"},
        )
    )
