"""What the policy sampled, read as a turn, and the answer made of it.

A call that is cut, malformed or without arguments stays text and is flagged: an invented ``{}`` would make the harness
do something the policy never said.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from opengyre.proxy.conversation import Message, Part, ToolCall
from opengyre.record.call import STEM
from opengyre.record.types import Finish

_MINTED = re.compile(rf"(?:toolu|gyre)_([0-9a-f]{{{STEM}}})[0-9a-f]+")


def mint_call_id() -> str:
    """A fresh tool-call id: a repeated one in a session destroys the turn in some clients."""
    return f"toolu_{uuid.uuid4().hex[:24]}"


def mint_for(call_id: str) -> Callable[[], str]:
    """Mints the tool-call ids of one model call, in order: they name it (``stem``), also after a restart."""
    numbers = count()
    return lambda: f"toolu_{call_id[:STEM]}{next(numbers):04x}"


def stem(minted: str) -> str | None:
    """How the call's id begins that minted a tool-call id or signature; None if it is not ours."""
    match = _MINTED.fullmatch(minted)
    return match[1] if match else None


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
