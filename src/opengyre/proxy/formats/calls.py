"""How tool calls are written, one ``Syntax`` per way. Each reads strictly: what is not exactly a call is not one.

hermes      <tool_call> {"name": "f", "arguments": {…}} </tool_call>
function    <tool_call> <function=f> <parameter=k> v </parameter> </function> </tool_call>
arg_key     <tool_call>f <arg_key>k</arg_key> <arg_value>v</arg_value> </tool_call>
deepseek    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
            (V3 and R1: function<｜tool▁sep｜>f, then the arguments in a ```json block)
invoke      <invoke name="f"> <parameter name="k">v</parameter> </invoke>, tags with a family's prefix
kimi        <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
mistral     [TOOL_CALLS]f[ARGS]{…}, or [TOOL_CALLS][{"name": …, "arguments": …}, …]
llama       {"name": "f", "parameters": {…}} as the whole text
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opengyre.proxy.conversation import Tool
from opengyre.proxy.formats.base import NamedCall, dump, json_at, typed, untyped

Found = tuple[list[NamedCall], int]  # the calls that start here, and where they end
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class Syntax:
    """One way to write calls.

    Attributes:
        openers: a call begins with one of these and nowhere else.
        read: (text, offset of an opener, tools) → the calls there, or None.
        write: calls → text.
        wrappers: stand around calls; dropped with them.
        tokens: tokens inside calls that are special in some tokenizers.
        leading: a call is one only at the beginning of the text.
    """

    openers: tuple[str, ...]
    read: Callable[[str, int, Sequence[Tool]], Found | None]
    write: Callable[[Sequence[NamedCall]], str]
    wrappers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    leading: bool = False


def _after(text: str, at: int, expected: str) -> int | None:
    """Where ``expected`` ends if it stands at ``at``, blanks before it aside."""
    start = _BLANKS.match(text, at).end()  # type: ignore[union-attr]  # matches anywhere
    return start + len(expected) if text.startswith(expected, start) else None


def _object_call(value: Any, arguments_key: str = "arguments") -> NamedCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get(arguments_key)
    return (name, arguments) if isinstance(arguments, dict) else None  # no arguments: an invented {} was never said


def _json_call(text: str, at: int, close: str) -> tuple[Any, int] | None:
    """A JSON value followed by ``close``."""
    if (found := json_at(text, at)) is None or (end := _after(text, found[1], close)) is None:
        return None
    return found[0], end


# -- <tool_call> -------------------------------------------------------------------------------------------------------

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(text: str, at: int, _: Sequence[Tool]) -> Found | None:
    found = _json_call(text, at + len(CALL_OPEN), CALL_CLOSE)
    call = _object_call(found[0]) if found else None
    return ([call], found[1]) if found and call else None


def _write_hermes(calls: Sequence[NamedCall]) -> str:
    bodies = (f'{{"name": {dump(name)}, "arguments": {dump(arguments)}}}' for name, arguments in calls)
    return "\n".join(f"{CALL_OPEN}\n{body}\n{CALL_CLOSE}" for body in bodies)


hermes = Syntax((CALL_OPEN,), _read_hermes, _write_hermes, tokens=(CALL_CLOSE,))

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*(<parameter=.*</parameter>)?\s*</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL)


def _body(text: str, at: int, opener: str = CALL_OPEN, close: str = CALL_CLOSE) -> tuple[str, int] | None:
    """What stands between the marker at ``at`` and the next closing one."""
    end = text.find(close, at)
    return (text[at + len(opener) : end], end + len(close)) if end >= 0 else None


def _own_lines(raw: str) -> str:
    """A value that the template puts on lines of its own."""
    return raw.removeprefix("\n").removesuffix("\n")


def function_tags(opener: str, close: str) -> Syntax:
    """Tagged parameters in a tagged function between ``opener`` and ``close``."""

    def read(text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        body = _body(text, at, opener, close)
        tagged = _FUNCTION.fullmatch(body[0]) if body else None
        if body is None or tagged is None:
            return None
        pairs = _PARAMETER.finditer(tagged[2] or "")
        return [(tagged[1], {m[1]: typed(_own_lines(m[2]), m[1], tagged[1], tools) for m in pairs})], body[1]

    def write(calls: Sequence[NamedCall]) -> str:
        texts = []
        for name, arguments in calls:
            values = "".join(f"<parameter={k}>\n{untyped(v)}\n</parameter>\n" for k, v in arguments.items())
            texts.append(f"{opener}\n<function={name}>\n{values}</function>\n{close}")
        return "\n".join(texts)

    return Syntax((opener,), read, write, tokens=(close,))


function = function_tags(CALL_OPEN, CALL_CLOSE)

_ARGS = re.compile(r"\s*([^\s<{]+)\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)", re.DOTALL)
_ARG = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_arg_key(text: str, at: int, tools: Sequence[Tool]) -> Found | None:
    body = _body(text, at)
    tagged = _ARGS.fullmatch(body[0]) if body else None
    if body is None or tagged is None:
        return None
    if not tagged[2] and tools and all(tagged[1] != tool.name for tool in tools):
        return None  # any single word looks like a call without arguments
    return [(tagged[1], {m[1]: typed(m[2], m[1], tagged[1], tools) for m in _ARG.finditer(tagged[2])})], body[1]


def _write_arg_key(calls: Sequence[NamedCall]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{untyped(v)}</arg_value>\n" for k, v in arguments.items())
        texts.append(f"{CALL_OPEN}{name}\n{pairs}{CALL_CLOSE}")
    return "\n".join(texts)


arg_key = Syntax(
    (CALL_OPEN,),
    _read_arg_key,
    _write_arg_key,
    tokens=(CALL_CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def _read_any(text: str, at: int, tools: Sequence[Tool]) -> Found | None:
    found = _read_hermes(text, at, tools) or function.read(text, at, tools)
    if found is None and "<arg_key>" in text[at : text.find(CALL_CLOSE, at)]:
        found = _read_arg_key(text, at, tools)
    return found


any_tool_call = Syntax((CALL_OPEN,), _read_any, _write_hermes, tokens=arg_key.tokens)

# -- families with tokens of their own ---------------------------------------------------------------------------------

_DS_OPEN, _DS_SEP, _DS_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DS_WRAPPERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DS_FENCED = re.compile(r"([^\n`{]+)\n```json\n")


def _read_deepseek(text: str, at: int, _: Sequence[Tool]) -> Found | None:
    start = at + len(_DS_OPEN)
    sep = text.find(_DS_SEP, start)
    if sep < 0:
        return None
    name, begin = text[start:sep].strip(), sep + len(_DS_SEP)
    fenced = _DS_FENCED.match(text, begin) if name == "function" else None
    if fenced:
        name, begin = fenced[1].strip(), fenced.end()
    found = json_at(text, begin)
    end = _after(text, found[1], "```") if found and fenced else found[1] if found else None
    end = _after(text, end, _DS_CLOSE) if end is not None else None
    call = _object_call({"name": name, "arguments": found[0]}) if found else None
    return ([call], end) if call and end is not None and "<" not in name else None


def _write_deepseek(calls: Sequence[NamedCall]) -> str:
    bodies = "".join(f"{_DS_OPEN}{name}{_DS_SEP}{dump(arguments)}{_DS_CLOSE}" for name, arguments in calls)
    return f"{_DS_WRAPPERS[0]}{bodies}{_DS_WRAPPERS[1]}"


def _write_deepseek_fenced(calls: Sequence[NamedCall]) -> str:
    bodies = "\n".join(
        f"{_DS_OPEN}function{_DS_SEP}{name}\n```json\n{dump(arguments)}\n```{_DS_CLOSE}" for name, arguments in calls
    )
    return f"{_DS_WRAPPERS[0]}{bodies}{_DS_WRAPPERS[1]}"


deepseek = Syntax((_DS_OPEN,), _read_deepseek, _write_deepseek, _DS_WRAPPERS, tokens=(_DS_SEP, _DS_CLOSE))
deepseek_fenced = Syntax((_DS_OPEN,), _read_deepseek, _write_deepseek_fenced, _DS_WRAPPERS, tokens=(_DS_SEP, _DS_CLOSE))


def invoke(prefix: str, wrapper: str, *more: str, marked: bool = False) -> Syntax:
    """Tags ``invoke`` and ``parameter`` with ``prefix`` inside a ``wrapper``, one of ``more``, or bare.

    ``marked``: a parameter says whether it is a string (``string="true"``); else the tool's schema does.
    """
    opener, close = f'<{prefix}invoke name="', f"</{prefix}invoke>"
    head = re.compile(re.escape(opener) + r'([^"<>\s]+)">\s*')
    pair = re.compile(
        rf'<{prefix}parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</{prefix}parameter>\s*', re.DOTALL
    )

    def read(text: str, at: int, tools: Sequence[Tool]) -> Found | None:
        if (named := head.match(text, at)) is None:
            return None
        values: dict[str, Any] = {}
        end = named.end()
        while (match := pair.match(text, end)) is not None:
            value = match[3]
            if match[2] is None:
                values[match[1]] = typed(value, match[1], named[1], tools)
            else:
                found = json_at(value, 0) if match[2] == "false" else None
                values[match[1]] = found[0] if found else value
            end = match.end()
        return ([(named[1], values)], end + len(close)) if text.startswith(close, end) else None

    def write(calls: Sequence[NamedCall]) -> str:
        lines = []
        for name, arguments in calls:
            lines.append(f'{opener}{name}">')
            for key, value in arguments.items():
                kind = f' string="{"true" if isinstance(value, str) else "false"}"' if marked else ""
                lines.append(f'<{prefix}parameter name="{key}"{kind}>{untyped(value)}</{prefix}parameter>')
            lines.append(close)
        return "\n".join((f"<{wrapper}>", *lines, f"</{wrapper}>"))

    tags = tuple(tag for w in (wrapper, *more) for tag in (f"<{w}>", f"</{w}>"))
    return Syntax((opener,), read, write, tags, tokens=("｜DSML｜",) if marked else ())


_KIMI_OPEN, _KIMI_ARGS, _KIMI_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_WRAPPERS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_ID = re.compile(r"\s*(?:functions\.)?([^\s<:]+)(?::\d+)?\s*" + re.escape(_KIMI_ARGS))


def _read_kimi(text: str, at: int, _: Sequence[Tool]) -> Found | None:
    named = _KIMI_ID.match(text, at + len(_KIMI_OPEN))
    found = _json_call(text, named.end(), _KIMI_CLOSE) if named else None
    call = _object_call({"name": named[1], "arguments": found[0]}) if named and found else None
    return ([call], found[1]) if found and call else None


def _write_kimi(calls: Sequence[NamedCall]) -> str:
    bodies = "".join(
        f"{_KIMI_OPEN}functions.{name}:{i}{_KIMI_ARGS}{dump(arguments)}{_KIMI_CLOSE}"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"{_KIMI_WRAPPERS[0]}{bodies}{_KIMI_WRAPPERS[1]}"


kimi = Syntax((_KIMI_OPEN,), _read_kimi, _write_kimi, _KIMI_WRAPPERS, tokens=(_KIMI_ARGS, _KIMI_CLOSE))

_MISTRAL_OPEN, _MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+?)(?:\[CALL_ID\][^\[\]{}]*)?" + re.escape(_MISTRAL_ARGS))


def _read_mistral(text: str, at: int, _: Sequence[Tool]) -> Found | None:
    start = at + len(_MISTRAL_OPEN)
    named = _MISTRAL_NAME.match(text, start)
    found = json_at(text, named.end() if named else start)
    if found is None:
        return None
    listed = [{"name": named[1], "arguments": found[0]}] if named else found[0]
    calls = [_object_call(c) for c in listed] if isinstance(listed, list) else []
    whole = [c for c in calls if c is not None]
    return (whole, found[1]) if whole and len(whole) == len(calls) else None


def _write_mistral(calls: Sequence[NamedCall]) -> str:
    return "".join(f"{_MISTRAL_OPEN}{name}{_MISTRAL_ARGS}{dump(arguments)}" for name, arguments in calls)


mistral = Syntax((_MISTRAL_OPEN,), _read_mistral, _write_mistral, tokens=(_MISTRAL_ARGS, "[CALL_ID]"))

_LLAMA_OPEN = '{"name"'


def _read_llama(text: str, at: int, _: Sequence[Tool]) -> Found | None:
    found = json_at(text, at)
    call = _object_call(found[0], "parameters") if found else None
    if found is None or call is None or text[found[1] :].strip(" \n;"):
        return None
    return [call], len(text)


def _write_llama(calls: Sequence[NamedCall]) -> str:
    return "; ".join(f'{{"name": {dump(name)}, "parameters": {dump(arguments)}}}' for name, arguments in calls)


llama = Syntax((_LLAMA_OPEN,), _read_llama, _write_llama, ("<|python_tag|>",), leading=True)
