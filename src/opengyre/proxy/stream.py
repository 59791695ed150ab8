"""Sampled ids as they come, read as far as it is certain: stop strings found, text deltas released.

A delta is released only if it is a prefix of what ``read_turn`` will make of the whole reply, so a streamed turn and a
whole one are the same turn. Tool calls are never released in parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from opengyre.proxy.render import Renderer
from opengyre.proxy.reply import CALL_OPEN, THINK_CLOSE, THINK_OPEN


class StopWatch:
    """Notices when one of the harness's stop strings has been sampled outside the reasoning."""

    def __init__(self, renderer: Renderer, stop: Sequence[str], thinking: bool | None) -> None:
        self._renderer, self._stop, self._thinking = renderer, [s for s in stop if s], thinking
        # A token is at least a byte, so a stop string spans no more tokens than it has bytes.
        self._window = max((len(s.encode()) for s in self._stop), default=0) + 1

    def hit(self, ids: Sequence[int], new: int) -> bool:
        """True if the last ``new`` of ``ids`` completed a stop string."""
        if not self._stop:
            return False
        recent = self._renderer.decode(ids[-(new + self._window) :])
        if not any(s in recent for s in self._stop):
            return False
        turn = self._renderer.parse(ids, "stop", thinking=self._thinking, stop=self._stop)
        return turn.stop_sequence is not None


class TextStream:
    """Turns ids into (kind, text) deltas, kind ``thinking`` or ``text``."""

    def __init__(self, renderer: Renderer, stop: Sequence[str], thinking: bool | None) -> None:
        self._renderer = renderer
        self._ids: list[int] = []  # not decoded yet: the end may be half a character
        self._buffer = ""
        self._state = "thinking" if renderer.opens_thinking(thinking) else "start"
        self._ends = {"thinking": (THINK_CLOSE,), "text": (CALL_OPEN, *(s for s in stop if s))}
        self._fresh = True  # nothing of the current kind was released: its leading newlines are not part of it

    def feed(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Deltas that became certain with ``ids``."""
        self._ids += ids
        text = self._renderer.decode(self._renderer.without_stop(self._ids))
        if text.endswith("\ufffd"):
            return []
        self._buffer += text
        self._ids = []
        deltas = []
        while (delta := self._step()) is not None:
            if delta[1]:
                deltas.append(delta)
        return deltas

    def _step(self) -> tuple[str, str] | None:
        """One release or change of state; None when more ids are needed."""
        if self._state == "start":
            head = self._buffer.lstrip()
            if THINK_OPEN.startswith(head[: len(THINK_OPEN)]) and len(head) < len(THINK_OPEN):
                return None
            self._state = "text"
            if head.startswith(THINK_OPEN):
                self._state, self._buffer = "thinking", head.removeprefix(THINK_OPEN)
        if self._state == "closed":
            return None
        kind = self._state
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        at = min((i for end in self._ends[kind] if (i := self._buffer.find(end)) >= 0), default=-1)
        if at >= 0:
            released = self._buffer[:at].rstrip()
            self._buffer = self._buffer[at:].removeprefix(THINK_CLOSE) if kind == "thinking" else ""
            self._state, self._fresh = ("text", True) if kind == "thinking" else ("closed", False)
            return kind, released
        released = self._certain(kind)
        self._buffer = self._buffer[len(released) :]
        self._fresh = self._fresh and not released
        return (kind, released) if released else None

    def _certain(self, kind: str) -> str:
        """The buffer without a possible beginning of what ends this kind, and without trailing whitespace."""
        held = max(
            (n for end in self._ends[kind] for n in range(1, len(end)) if self._buffer.endswith(end[:n])), default=0
        )
        return self._buffer[: len(self._buffer) - held].rstrip()
