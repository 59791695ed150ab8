"""From a harness's conversation to the exact token ids an engine will see: restore, match, render, measure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from opengyre.proxy.conversation import Conversation
from opengyre.proxy.dialects.base import Dialect
from opengyre.proxy.lines import Line, Path
from opengyre.proxy.reader import Request, read
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.render import NO_BOUNDARY, Renderer
from opengyre.proxy.session import Session
from opengyre.record.call import Attach
from opengyre.record.types import Ids

HEADERS = (  # what role rules read; also what tells two agents of one harness apart
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    "x-claude-code-session-id",
    "x-session-id",
    "x-parent-session-id",
    "session-id",
    "thread-id",
    "x-codex-parent-thread-id",
    "x-codex-window-id",
    "x-codex-turn-metadata",
    "x-openai-subagent",
    "user-agent",
)
_PER_REQUEST = ("x-codex-turn-metadata", "user-agent")  # say nothing about who is asking


class Asked(NamedTuple):
    """A body that came in, and the line of its session whose first ``cut`` history entries it repeats."""

    dialect: Dialect
    body: bytes
    line: Line | None = None
    cut: int = 0

    @property
    def new_bytes(self) -> int:
        """About how much of the body was never read before."""
        if self.line is None or not self.cut:
            return len(self.body)
        after = len(self.line.body) - self.line.ends[-1]  # what stands after the history is much the same every time
        return len(self.body) - self.line.ends[self.cut - 1] - after


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that fits: what will be sent to an engine, and where it hangs in the tree.

    ``prompt`` is the whole prompt: the recorded ids up to ``attach``, then ``tail_ids``.
    """

    request: Request
    dialect: str
    headers: dict[str, str]
    attach: Attach
    tail_ids: Ids
    marks: tuple[tuple[bytes, int], ...]
    prompt: Path
    max_new_tokens: int

    @property
    def conversation(self) -> Conversation:
        """What was asked; its first ``request.known`` messages are skeletons."""
        return self.request.conversation

    @property
    def key(self) -> bytes:
        """Key of the whole request."""
        return self.request.keys[-1]

    @property
    def identity(self) -> bytes:
        """Equal for re-sends of one request by one agent, streamed or not."""
        c = self.conversation
        agent = sorted((name, value) for name, value in self.headers.items() if name not in _PER_REQUEST)
        asked = (self.key, c.max_tokens, c.stop_sequences, c.thinking, agent)
        return blake2b(repr(asked).encode(), digest_size=16).digest()


def prepare(renderer: Renderer, session: Session, asked: Asked, headers: dict[str, str]) -> Prepared:
    """Read, match, render and measure a request. Records nothing, and no engine hears of it. May run in a thread.

    Raises Refusal (400): it cannot be read or rendered, or does not fit into the context.
    """
    request, attach, shared = _match(session, asked)
    tail = renderer.render_tail(request.conversation, attach.n_messages, session.tree.last_id(attach))
    tail_ids = np.asarray(tail.ids, np.int32)
    room = _room(renderer.context, session.pins.max_tokens, request.conversation, attach.depth + len(tail_ids))
    new = zip(request.keys[attach.n_messages :], tail.ends, strict=True)
    return Prepared(
        request=request,
        dialect=asked.dialect.name,
        headers=headers,
        attach=attach,
        tail_ids=tail_ids,
        marks=tuple((key, end) for key, end in new if end != NO_BOUNDARY),
        prompt=(shared or Path.of(session.tree.prompt_ids(attach))).extended(tail_ids),
        max_new_tokens=room,
    )


def count(renderer: Renderer, session: Session, asked: Asked) -> int:
    """Prompt tokens that a generation would report; leaves no trace. Raises Refusal (400)."""
    request, attach, _ = _match(session, asked)
    tail = renderer.render_tail(request.conversation, attach.n_messages, session.tree.last_id(attach))
    return attach.depth + len(tail.ids)


def _match(session: Session, asked: Asked) -> tuple[Request, Attach, Path | None]:
    """The request, where it goes on, and the path of its line if that ends there."""
    request = read(asked.dialect, session.history, asked.body, asked.line, asked.cut)
    if not request.conversation.messages:
        raise Refusal("messages: at least one message is required")
    attach = session.tree.match(request.keys)
    if attach.n_messages < request.known:  # what it goes on from is not recorded: all words are needed
        request = read(asked.dialect, session.history, asked.body)
        attach = session.tree.match(request.keys)
    path = asked.line.path if asked.line is not None else None
    if path is not None and (path.via, path.depth) == (attach.via, attach.depth):
        return request, attach, path
    return request, attach, None


def _room(limit: int, pin: int | None, conversation: Conversation, prompt: int) -> int:
    """Tokens to sample. The two messages are in the words that clients know how to act on."""
    if prompt >= limit:  # a prompt that leaves no token for the reply is too long already
        raise Refusal(f"prompt is too long: {prompt} tokens > {limit - 1} maximum", code="context_length_exceeded")
    asked = conversation.max_tokens
    wanted = min((n for n in (asked, pin) if n is not None), default=limit - prompt)
    if asked is not None and prompt + wanted > limit:
        raise Refusal(
            f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {limit}",
            code="context_length_exceeded",
        )
    return min(wanted, limit - prompt)
