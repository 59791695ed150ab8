"""From a harness's conversation to the exact token ids an engine will see: restore, match, render, measure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from opengyre.proxy.conversation import Conversation
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.render import NO_BOUNDARY, Rendered, Renderer
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that fits: what will be sent to an engine, and where it hangs in the tree.

    ``prompt_ids`` is the whole prompt: the recorded ids up to ``attach``, then ``tail_ids``.
    """

    conversation: Conversation
    dialect: str
    headers: dict[str, str]
    keys: list[bytes]
    attach: Attach
    tail_ids: Ids
    marks: tuple[tuple[bytes, int], ...]
    prompt_ids: Ids
    max_new_tokens: int

    @property
    def identity(self) -> bytes:
        """Equal for re-sends of one request by one agent, streamed or not."""
        c = self.conversation
        agent = sorted((name, value) for name, value in self.headers.items() if name not in _PER_REQUEST)
        asked = (self.keys[-1], c.max_tokens, c.stop_sequences, c.thinking, agent)
        return blake2b(repr(asked).encode(), digest_size=16).digest()


def prepare(
    renderer: Renderer, session: Session, conversation: Conversation, *, dialect: str, headers: dict[str, str]
) -> Prepared:
    """Read, match, render and measure a request. Changes nothing, and no engine hears of it.

    Raises Refusal (400): it cannot be rendered or does not fit into the context.
    """
    conversation, chain, attach, shared, tail = _resolve(renderer, session, conversation)
    tail_ids = np.asarray(tail.ids, np.int32)
    new = zip(chain[attach.n_messages :], tail.ends, strict=True)
    return Prepared(
        conversation=conversation,
        dialect=dialect,
        headers=headers,
        keys=chain,
        attach=attach,
        tail_ids=tail_ids,
        marks=tuple((key, end) for key, end in new if end != NO_BOUNDARY),
        prompt_ids=np.concatenate([shared, tail_ids]),
        max_new_tokens=_room(renderer.context, session.pins.max_tokens, conversation, len(shared) + len(tail_ids)),
    )


def count(renderer: Renderer, session: Session, conversation: Conversation) -> int:
    """Prompt tokens that a generation of ``conversation`` would report; leaves no trace."""
    *_, shared, tail = _resolve(renderer, session, conversation)
    return len(shared) + len(tail.ids)


def _resolve(
    renderer: Renderer, session: Session, conversation: Conversation
) -> tuple[Conversation, list[bytes], Attach, Ids, Rendered]:
    if not conversation.messages:
        raise Refusal("messages: at least one message is required")
    conversation, chain = session.history.read(conversation)
    attach = session.tree.match(chain)
    shared = session.tree.prompt_ids(attach)
    tail = renderer.render_tail(conversation, attach.n_messages, int(shared[-1]) if len(shared) else None)
    return conversation, chain, attach, shared, tail


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
