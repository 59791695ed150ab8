"""What a family of models has to say about its turns.

The chat template is the authority for prompts. A template does not say how to read what the model answers, which part
of an unfinished answer is certain already, or how to write what the template itself cannot: that is a ``Format``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from opengyre.proxy.conversation import Message, Tool

NamedCall = tuple[str, dict[str, Any]]  # (tool name, arguments): a call before it gets an id
_SCANNER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Said:
    """A turn as it was read. ``closed`` is False when it ends inside its reasoning.

    ``malformed`` counts calls that stayed text; ``hit`` is the stop string that ended the text.
    """

    thinking: str
    text: str
    calls: list[NamedCall] = field(default_factory=list)
    malformed: int = 0
    closed: bool = True
    hit: str | None = None


class Release(Protocol):
    """Reads a turn as it comes and gives out what cannot change any more."""

    def feed(self, text: str) -> list[tuple[str, str]]:
        """(kind, text) deltas, kind ``thinking`` or ``text``, that became certain with ``text``.

        All deltas of a kind together are a prefix of what ``Format.read`` makes of the whole turn, and no thinking
        follows text.
        """
        ...


class Format(ABC):
    """One way of writing turns. Stateless.

    Attributes:
        name: as in ``model.format``.
        markers: tokens the reader has to see, be they special or not; all other special tokens are dropped.
        stops: tokens that end a turn, besides those that the model folder and the template name.
        ends: tokens after which a turn of the history needs no end of its own.
        cut_end: what a turn that was cut gets before the next message; None: what the template writes.
    """

    name: str
    markers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    cut_end: str | None = None

    @abstractmethod
    def speaks(self, template: str) -> bool:
        """True if a chat template with this source is written for the format."""

    @abstractmethod
    def opened(self, generation: str) -> bool:
        """True if a prompt that ends with ``generation`` ends inside the reasoning."""

    @abstractmethod
    def read(
        self, text: str, *, opened: bool, complete: bool, tools: Sequence[Tool] = (), stop: Sequence[str] = ()
    ) -> Said:
        """Read a decoded turn (without its stop token).

        ``opened``: the prompt ended inside the reasoning. ``complete``: the policy ended the turn itself. ``tools``
        give untyped argument values their types. ``stop`` strings cut the visible text.
        """

    @abstractmethod
    def release(self, *, opened: bool, stop: Sequence[str] = ()) -> Release:
        """A reader of one turn as it comes."""

    @abstractmethod
    def write_calls(self, calls: Sequence[NamedCall]) -> str:
        """Calls as the model writes them, for templates that cannot."""

    def write(self, message: Message) -> str | None:
        """A message that the template would write wrongly or not at all; None leaves it to the template."""
        return None

    def call_id(self, name: str, index: int) -> str | None:
        """The id the model itself gives the ``index``-th call of a conversation; None if it gives none."""
        return None

    def for_template(self, template: str) -> Format:
        """The format with what it takes from the template's source."""
        return self


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """``text`` up to the first stop string, and that string."""
    found = [(at, s) for s in stop if s and (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, hit = min(found)
    return text[:at], hit


def held(text: str, ends: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``ends``."""
    return max((n for end in ends for n in range(1, len(end)) if text.endswith(end[:n])), default=0)


def json_at(text: str, at: int) -> tuple[Any, int] | None:
    """The strict JSON value (no NaN) that starts at ``at``, blanks before it aside, and where it ends."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    try:
        _, end = _SCANNER.raw_decode(text, at)
        return msgspec.json.decode(text[at:end]), end
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, as are lone surrogates
        return None


def dump(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def typed(raw: str, key: str, name: str, tools: Sequence[Tool]) -> Any:
    """An untyped argument value: a string unless the tool's schema says otherwise and it is JSON."""
    schema: Any = next((t.parameters.get("properties") for t in tools if t.name == name), None)
    if "string" in _kinds(schema.get(key) if isinstance(schema, dict) else None):
        return raw
    value = json_at(raw, 0)
    return value[0] if value is not None and not raw[value[1] :].strip() else raw


def untyped(value: Any) -> str:
    """An argument value as formats without quotes write it."""
    return value if isinstance(value, str) else dump(value)


def _kinds(declared: Any) -> set[str]:
    """The JSON types a schema admits. A declared value without a type may be anything but is rarely a string."""
    if not isinstance(declared, dict):
        return {"string"}
    kind = declared.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for branch in ("anyOf", "oneOf"):
        for option in declared.get(branch) or []:
            kinds |= _kinds(option)
    if isinstance(values := declared.get("enum"), list) and any(isinstance(v, str) for v in values):
        kinds.add("string")
    return kinds
