"""Turns with tags in running text: reasoning first, then words, then calls. Most families write like this.

[<think>] reasoning </think> words <call> … </call> …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from opengyre.proxy.conversation import Tool
from opengyre.proxy.formats.base import Format, NamedCall, Said, cut_at, held
from opengyre.proxy.formats.calls import Syntax

THINK = ("<think>", "</think>")
# Other families' reasoning tags, looked for in the template's source.
_THINKS = (THINK, ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


@dataclass(frozen=True, eq=False)
class Tagged(Format):
    """Reasoning between ``think`` tags, calls in one ``syntax``.

    Reasoning stands at the beginning of a turn, in one block or several; a tag further down is text. A call ends
    reasoning that was never closed, as serving engines have it.

    Attributes:
        signs: what a template's source contains, all of one group, when it is written for the format.
        ids: how the model names its calls, with ``{name}`` and ``{index}``; empty if it does not.
    """

    name: str
    syntax: Syntax
    signs: tuple[tuple[str, ...], ...]
    think: tuple[str, str] = THINK
    ids: str = ""
    markers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        syntax = self.syntax
        object.__setattr__(self, "markers", (*self.think, *syntax.openers, *syntax.wrappers, *syntax.tokens))

    def speaks(self, template: str) -> bool:
        return any(all(sign in template for sign in group) for group in self.signs)

    def for_template(self, template: str) -> Format:
        return replace(self, think=next((pair for pair in _THINKS if pair[1] in template), self.think))

    def opened(self, generation: str) -> bool:
        _, found, inside = generation.rpartition(self.think[0])
        return bool(found) and self.think[1] not in inside

    def call_id(self, name: str, index: int) -> str | None:
        return self.ids.format(name=name, index=index) or None

    def write_calls(self, calls: Sequence[NamedCall]) -> str:
        return self.syntax.write(calls)

    def read(
        self, text: str, *, opened: bool, complete: bool, tools: Sequence[Tool] = (), stop: Sequence[str] = ()
    ) -> Said:
        thinking, rest, closed = self._reasoning(text, opened, complete, tools)
        rest, hit = cut_at(rest, stop)
        calls, pieces, malformed = self._calls(rest, tools)
        words = [s for piece in pieces if (s := piece.strip("\n")) and not s.isspace()]
        return Said(thinking, "\n".join(words), calls, malformed, closed, hit)

    def _reasoning(self, text: str, inside: bool, complete: bool, tools: Sequence[Tool]) -> tuple[str, str, bool]:
        """(reasoning, rest, whether the reasoning was closed)."""
        blocks, (begin, close) = list[str](), self.think
        while True:
            if not inside:
                body = text.lstrip()
                if not body.startswith(begin):
                    return "\n".join(blocks), text, True
                text = body.removeprefix(begin)
            block, closed, rest = text.partition(close)
            at = -1 if closed or not complete else self._next(block, 0)
            if at >= 0 and self.syntax.read(block, at, tools) is not None:
                at = min([at, *(i for w in self.syntax.wrappers if (i := block.find(w)) >= 0)])
                block, closed, rest = block[:at], close, block[at:]
            if block.strip():
                blocks.append(block.strip("\n"))
            if not closed:
                return "\n".join(blocks), "", False
            text, inside = rest, False

    def _next(self, text: str, at: int) -> int:
        if self.syntax.leading and text[:at].strip():
            return -1
        found = min((i for opener in self.syntax.openers if (i := text.find(opener, at)) >= 0), default=-1)
        return found if not self.syntax.leading or not self._unwrapped(text[: max(found, 0)]).strip() else -1

    def _calls(self, text: str, tools: Sequence[Tool]) -> tuple[list[NamedCall], list[str], int]:
        """(calls, the text before, between and after them, how many stayed text)."""
        calls, pieces, malformed = list[NamedCall](), list[str](), 0
        kept = searched = 0
        while (at := self._next(text, searched)) >= 0:
            found = self.syntax.read(text, at, tools)
            if found is None:
                malformed += 1
                searched = at + 1
                continue
            pieces.append(text[kept:at])
            calls += found[0]
            kept = searched = found[1]
        pieces.append(text[kept:])
        if calls:
            return calls, [self._unwrapped(piece) for piece in pieces], malformed
        wrapped = not malformed and bool(self.syntax.wrappers) and self.syntax.wrappers[0] in text
        return calls, pieces, malformed + wrapped

    def _unwrapped(self, piece: str) -> str:
        for wrapper in self.syntax.wrappers:
            piece = piece.replace(wrapper, "")
        return piece

    def release(self, *, opened: bool, stop: Sequence[str] = ()) -> TaggedRelease:
        closing = (*self.syntax.openers, *self.syntax.wrappers)
        return TaggedRelease(self.think, closing, [s for s in stop if s], opened=opened)


class TaggedRelease:
    """Thinking and words as far as they are certain. Nothing is released from the first call or stop string on.

        start ─▶ thinking ─▶ start …            start: blanks, perhaps the beginning of a reasoning block
          └────▶ text ─▶ closed

    Text is released only while it is one piece; what follows a call waits for the whole turn.
    """

    def __init__(self, think: tuple[str, str], calls: tuple[str, ...], stop: Sequence[str], *, opened: bool) -> None:
        self._think = think
        self._ends = {"thinking": (think[1], *calls), "text": (*calls, *stop)}
        self._state = "thinking" if opened else "start"
        self._buffer = ""
        self._fresh = True  # nothing of this block was released: its leading newlines are not part of it
        self._thought = False  # an earlier block was released: the next one stands on a new line

    def feed(self, text: str) -> list[tuple[str, str]]:
        self._buffer += text
        deltas = []
        while (delta := self._step()) is not None:
            if delta[1]:
                deltas.append(delta)
        return deltas

    def _step(self) -> tuple[str, str] | None:
        """One release or change of state; None when more is needed."""
        if self._state == "start":
            head = self._buffer.lstrip()
            begin = self._think[0]
            if len(head) < len(begin) and begin.startswith(head):
                return None
            self._fresh, self._state = True, "text"
            if head.startswith(begin):
                self._state, self._buffer = "thinking", head.removeprefix(begin)
        if self._state == "closed":
            return None
        kind = self._state
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        ends = self._ends[kind]
        at, end = min(((i, e) for e in ends if (i := self._buffer.find(e)) >= 0), default=(-1, ""))
        if at < 0:
            certain = self._buffer[: len(self._buffer) - held(self._buffer, ends)].rstrip()
            return self._give(kind, certain) if certain else None
        if kind == "thinking" and end != self._think[1]:  # a call in the reasoning: it may end it, or be part of it
            released, self._state = self._buffer[:at].rstrip(), "closed"
            return self._give(kind, released)
        if kind == "text":
            self._state = "closed"
            return self._give(kind, self._buffer[:at].rstrip())
        block = self._buffer[:at].rstrip("\n")
        given = self._give(kind, "" if self._fresh and not block.strip() else block)
        self._buffer = self._buffer[self._buffer.find(end) + len(end) :]
        self._state = "start"
        return given

    def _give(self, kind: str, text: str) -> tuple[str, str]:
        """Take ``text`` from the buffer."""
        self._buffer = self._buffer[len(text) :]
        if kind == "thinking" and text:
            text = f"\n{text}" if self._fresh and self._thought else text
            self._thought = True
        self._fresh = self._fresh and not text
        return kind, text
