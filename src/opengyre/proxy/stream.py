"""Sampled ids as they come, read as far as it is certain: stop strings found, text deltas released.

A delta is released only if it is a prefix of what ``Renderer.parse`` will make of the whole reply, so a streamed turn
and a whole one are the same turn. Tool calls are never released in parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from opengyre.proxy.render import Renderer

_CONTEXT = 4  # tokens decoded again with the next ones: some tokenizers drop a blank at the beginning of a text


class StopWatch:
    """Notices when one of the harness's stop strings has been sampled outside the reasoning.

    ``thinking`` is the conversation's, ``after`` the role of its last message.
    """

    def __init__(self, renderer: Renderer, stop: Sequence[str], thinking: bool | None, after: str = "user") -> None:
        self._renderer, self._stop = renderer, [s for s in stop if s]
        self._thinking, self._after = thinking, after
        # A token is at least a byte, so a stop string spans no more tokens than it has bytes.
        self._window = max((len(s.encode()) for s in self._stop), default=0) + 1

    def hit(self, ids: Sequence[int], new: int) -> bool:
        """True if the last ``new`` of ``ids`` completed a stop string."""
        if not self._stop:
            return False
        recent = self._renderer.decode(ids[-(new + self._window) :])
        if not any(s in recent for s in self._stop):
            return False
        turn = self._renderer.parse(ids, "stop", thinking=self._thinking, after=self._after, stop=self._stop)
        return turn.stop_sequence is not None


class TextStream:
    """Turns ids into (kind, text) deltas, kind ``thinking`` or ``text``. Arguments as for ``StopWatch``."""

    def __init__(self, renderer: Renderer, stop: Sequence[str], thinking: bool | None, after: str = "user") -> None:
        self._renderer = renderer
        self._release = renderer.format.release(opened=renderer.opens_thinking(thinking, after), stop=stop)
        self._seen: list[int] = []  # the last tokens of what was read
        self._ids: list[int] = []  # not read yet: the end may be half a character

    def feed(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Deltas that became certain with ``ids``."""
        self._ids += ids
        pending = list(self._renderer.without_stop(self._ids))
        kept = self._ids[len(pending) :]
        before, both = self._renderer.decode(self._seen), self._renderer.decode([*self._seen, *pending])
        if both.endswith("\ufffd") or not both.startswith(before):
            return []
        self._seen, self._ids = [*self._seen, *pending][-_CONTEXT:], kept
        return self._release.feed(both[len(before) :])
