"""What the policy sampled, read as a turn: reasoning, text, tool calls.

    <think> reasoning </think> text <tool_call> {"name": …, "arguments": {…}} </tool_call> …              Hermes, Qwen3
                                    <tool_call> <function=name> <parameter=key> value … </tool_call>    Qwen3-Coder, 3.5

A call that is cut, malformed or without arguments stays text and is flagged: an invented ``{}`` would make the harness
do something the policy never said.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from opengyre.proxy.conversation import Message, Part, Text, Thinking, Tool, ToolCall
from opengyre.record.types import Finish

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
_CALL = re.compile(re.escape(CALL_OPEN) + r"(.*?)" + re.escape(CALL_CLOSE), re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*(<parameter=.*</parameter>)?\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL)


def mint_call_id() -> str:
    """A fresh tool-call id: a repeated one in a session destroys the turn in some clients."""
    return f"toolu_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: thinking, then text, then calls, the order in which clients send it back.

    ``complete`` is False when the turn was cut; ``malformed`` counts tool calls that stayed text; ``stop_sequence`` is
    the stop string that ended it.
    """

    parts: tuple[Part, ...]
    complete: bool
    malformed: int = 0
    stop_sequence: str | None = None

    @property
    def message(self) -> Message:
        """The turn as a message of the conversation that follows."""
        return Message("assistant", self.parts)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Tool calls in order."""
        return tuple(p for p in self.parts if isinstance(p, ToolCall))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answered call, recorded: what the dialects write. Token counts are the true ones."""

    call_id: str
    turn: Turn
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    delivered: bool


def signature(call_id: str) -> str:
    """The opaque signature of a call's reasoning: clients drop a block without one, and it names the turn."""
    return f"gyre_{call_id}"


def read_turn(
    text: str,
    *,
    complete: bool,
    thinking_open: bool = False,
    tools: Sequence[Tool] = (),
    stop: Sequence[str] = (),
    mint: Callable[[], str] = mint_call_id,
) -> Turn:
    """Read decoded text (without its stop token).

    ``thinking_open``: the prompt ended inside a reasoning block. ``tools`` give untyped argument values their types.
    """
    thought, text, closed = _split_thinking(text, thinking_open)
    text, hit = cut_at(text, stop)
    calls, said, malformed = [], [], 0
    position = 0
    for match in _CALL.finditer(text):
        call = _read_call(match[1], tools, mint)
        if call is None:
            malformed += 1
            continue
        said.append(text[position : match.start()])
        position = match.end()
        calls.append(call)
    said.append(text[position:])
    malformed += CALL_OPEN in said[-1][said[-1].rfind(CALL_CLOSE) + 1 :]
    visible = "\n".join(s for piece in said if (s := piece.strip("\n")) and not s.isspace())
    parts: list[Part] = [Thinking(thought)] if thought else []
    parts += [Text(visible)] if visible else []
    return Turn((*parts, *calls), complete and closed, malformed, hit)


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """``text`` up to the first stop string, and that string."""
    found = [(at, s) for s in stop if s and (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, hit = min(found)
    return text[:at], hit


def _split_thinking(text: str, thinking_open: bool) -> tuple[str, str, bool]:
    """(reasoning, rest, whether the reasoning was closed)."""
    body = text
    if not thinking_open:
        body = text.lstrip()
        if not body.startswith(THINK_OPEN):
            return "", text, True
        body = body.removeprefix(THINK_OPEN)
    thought, close, rest = body.partition(THINK_CLOSE)
    return thought.strip("\n"), rest, bool(close)


def _read_call(body: str, tools: Sequence[Tool], mint: Callable[[], str]) -> ToolCall | None:
    if (tagged := _FUNCTION.fullmatch(body)) is not None:
        return ToolCall(mint(), tagged[1], _parameters(tagged[2] or "", tools, tagged[1]))
    value = _json(body.strip())
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments")
    return ToolCall(mint(), value["name"], arguments) if isinstance(arguments, dict) else None


def _parameters(text: str, tools: Sequence[Tool], name: str) -> dict[str, Any]:
    """Tagged parameters. A value is a string unless the tool's schema says otherwise and it is JSON."""
    schema: Any = next((t.parameters.get("properties") for t in tools if t.name == name), None)
    values: dict[str, Any] = {}
    for match in _PARAMETER.finditer(text):
        raw = match[2].removeprefix("\n").removesuffix("\n")  # the template puts a value on lines of its own
        declared = schema.get(match[1]) if isinstance(schema, dict) else None
        kind = declared.get("type") if isinstance(declared, dict) else "string"
        value = raw if kind == "string" else _json(raw.strip())
        values[match[1]] = raw if value is _NOT_JSON else value
    return values


_NOT_JSON = object()


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)  # strict: no NaN, no lone surrogates
    except msgspec.DecodeError:
        return _NOT_JSON
