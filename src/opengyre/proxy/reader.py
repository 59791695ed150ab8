"""A request body read as far as it is new.

    body ─▶ which recorded line shares its bytes, and up to which entry? ─▶ read the entries after that only
                                │ none, or the cut would part what belongs together
                                ▼
                          read every entry             no list of entries, or JSON that only Python reads: parse whole

Reading on gives exactly what reading everything gives: the bytes up to the cut are those of a body that was read, so
they mean the same, and a cut never parts a turn or a run of tool results.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from opengyre.proxy import keys
from opengyre.proxy.conversation import Conversation
from opengyre.proxy.dialects.base import Dialect, Reading, Toolset
from opengyre.proxy.history import History
from opengyre.proxy.lines import JOINED, Line, Note
from opengyre.proxy.refusals import Refusal

TOOLSETS = 64  # kept parsed: one per kind of agent in a run; 100 kB each in the largest harnesses
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_BLANK = b" \t\r\n"
# Any escape in JSON; group 1 is half of a surrogate pair alone, which is no text: tokenizers and UTF-8 refuse it.
_ESCAPE = re.compile(rb"\\(?:u[dD][89aAbB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was meant.

    The first ``known`` of ``conversation.messages`` are skeletons (``lines.skeleton``): recorded, not to be rendered.
    ``keys`` has one key per message, ``note`` is the last one's. ``line`` is what to keep when the request is recorded,
    if it can be; ``grown_from`` the line that it makes superfluous.
    """

    conversation: Conversation
    keys: list[bytes]
    note: Note
    known: int = 0
    line: Line | None = None
    grown_from: Line | None = None


class _Wire(NamedTuple):
    """A body taken apart: its fields, the history's entries after the cut and the offsets they end at."""

    fields: dict[str, Any]
    tools: bytes
    entries: list[msgspec.Raw]
    start: int
    ends: list[int]


def read(dialect: Dialect, history: History, body: bytes, line: Line | None = None, cut: int = 0) -> Request:
    """Read a request; its first ``cut`` entries are ``line``'s. Raises Refusal (400) naming what is wrong.

    Only ``history`` is written to: it notes strange turns. May run in a thread.
    """
    try:
        if line is not None and line.epoch == history.epoch and (cut := line.clean_cut(cut)):
            wire = _take_apart(dialect, body, line.start, line.ends[cut - 1])
            request = _read_on(dialect, history, body, wire, line, cut) if wire is not None else None
            if request is not None:
                return request
        wire = _take_apart(dialect, body)
        if wire is not None:
            return _read_all(dialect, history, body, wire)
    except msgspec.DecodeError:
        pass  # a value that only Python's JSON reads
    return _read_whole(dialect, history, body)


def _read_all(dialect: Dialect, history: History, body: bytes, wire: _Wire) -> Request:
    """Read every entry."""
    epoch = history.epoch
    toolset, seed = _toolset(dialect, wire.tools)
    into = Reading()
    dialect.lead(wire.fields, into)
    lead, counts, placeholders = len(into.messages), list[int](), list[int]()
    for i, entry in enumerate(wire.entries):
        dialect.entry(i, _value(entry), into)
        counts.append(len(into.messages))
        placeholders.append(into.placeholders)
    known = history.read(into.messages, seed, Note())
    into.messages = known.messages
    conversation = dialect.request(wire.fields, into, toolset)
    note = known.notes[-1] if known.notes else Note()
    if not wire.entries:
        return Request(conversation, known.keys, note)
    fresh = Line(
        dialect=dialect.name,
        body=body,
        start=wire.start,
        ends=wire.ends,
        counts=counts,
        placeholders=placeholders,
        lead=lead,
        lead_key=known.keys[lead - 1] if lead else seed,
        messages=conversation.messages,
        keys=known.keys,
        notes=known.notes,
        epoch=epoch,
    )
    return Request(conversation, known.keys, note, line=fresh)


def _read_on(dialect: Dialect, history: History, body: bytes, wire: _Wire, line: Line, cut: int) -> Request | None:
    """Read what follows the cut; None if everything must be read."""
    toolset, seed = _toolset(dialect, wire.tools)
    lead = Reading()
    dialect.lead(wire.fields, lead)
    before = history.read(lead.messages, seed, Note())
    if len(lead.messages) != line.lead or (before.keys[-1] if before.keys else seed) != line.lead_key:
        return None
    known = line.counts[cut - 1]
    into, counts, placeholders = Reading(), line.counts[:cut], line.placeholders[:cut]
    into.placeholders = placeholders[-1]
    for i, entry in enumerate(wire.entries, cut):
        dialect.entry(i, _value(entry), into)
        counts.append(known + len(into.messages))
        placeholders.append(into.placeholders)
    if into.messages and (line.messages[known - 1].role, into.messages[0].role) in JOINED:
        earlier = line.clean_cut(cut - 1)
        taken = _take_apart(dialect, body, line.start, line.ends[earlier - 1]) if earlier else None
        return _read_on(dialect, history, body, taken, line, earlier) if taken is not None else None
    new = history.read(into.messages, line.keys[known - 1], line.notes[known - 1])
    conversation = dialect.request(wire.fields, into, toolset)
    conversation = replace(conversation, messages=(*line.messages[:known], *new.messages))
    chain, notes = line.keys[:known] + new.keys, line.notes[:known] + new.notes
    grown = replace(
        line,
        body=body,
        ends=line.ends[:cut] + wire.ends,
        counts=counts,
        placeholders=placeholders,
        messages=conversation.messages,
        keys=chain,
        notes=notes,
        path=None,
    )
    superfluous = line if cut >= len(line.ends) - 1 else None  # the last entry often changes: cache markers move on
    return Request(conversation, chain, notes[-1], known, grown, superfluous)


def _read_whole(dialect: Dialect, history: History, body: bytes) -> Request:
    """Read a body at once, as Python's JSON reads it."""
    try:
        fields = json.loads(_mended(body).decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal("the body is not a JSON object")
    conversation = dialect.parse(fields)
    known = history.read(conversation.messages, keys.seed(conversation.tools), Note())
    conversation = replace(conversation, messages=tuple(known.messages))
    return Request(conversation, known.keys, known.notes[-1] if known.notes else Note())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _take_apart(dialect: Dialect, body: bytes, start: int = 0, end: int = 0) -> _Wire | None:
    """The body without the entries in [start, end), which are known; None if there is no list of entries to find."""
    text, skipped = body, 0
    if end:
        following = _next_entry(body, end)
        if following is None:
            return None
        text, skipped = body[:start] + body[following:], following - start
    try:
        return _split(dialect, text, start, skipped)
    except msgspec.DecodeError:
        pass
    mended = _mended(text)
    try:
        return _split(dialect, mended, start, skipped) if mended != text else None
    except msgspec.DecodeError:
        return None


def _split(dialect: Dialect, text: bytes, start: int, skipped: int) -> _Wire | None:
    raw = _FIELDS.decode(text)
    listed = raw.pop(dialect.history, None)
    if listed is None or not (listing := bytes(listed)).startswith(b"["):
        return None
    at = _address(listed) - _address(text) + 1
    if start and at != start:
        return None  # the field comes twice: the last one counts
    entries = _ENTRIES.decode(listing)
    ends, position = [], 0
    for entry in entries:
        position += 1  # the bracket or the comma before it
        size = len(memoryview(entry))
        while listing[position] in _BLANK:
            position += 1
        position += size
        ends.append(at - 1 + position + skipped)
        while listing[position] in _BLANK:
            position += 1
    tools = bytes(raw.pop("tools", b"null"))
    return _Wire({name: _value(value) for name, value in raw.items()}, tools, entries, at, ends)


def _next_entry(body: bytes, end: int) -> int | None:
    """Where the list that has an entry ending at ``end`` goes on: at the next entry, or at its bracket."""
    at = _past_blanks(body, end)
    if body[at : at + 1] != b",":
        return at
    at = _past_blanks(body, at + 1)
    return None if body[at : at + 1] == b"]" else at  # a comma before the bracket is no JSON


def _past_blanks(body: bytes, at: int) -> int:
    while body[at : at + 1] in (b" ", b"\t", b"\r", b"\n"):
        at += 1
    return at


@lru_cache(maxsize=TOOLSETS)
def _toolset(dialect: Dialect, raw: bytes) -> tuple[Toolset, bytes]:
    """Tools and the key they start a chain with; the same few come with every request."""
    toolset = dialect.toolset(_value(raw))
    return toolset, keys.seed(toolset.tools)


def _value(raw: bytes | msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _mended(body: bytes) -> bytes:
    """Halves of surrogate pairs replaced by U+FFFD, byte for byte at the same place."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return _ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], body)


def _address(buffer: bytes | msgspec.Raw) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
