"""Conversations to token ids and back.

    [header + m0] [m1] [m2: assistant … stop] [sep + m3] … [sep] [generation prompt]      one encoding per bracket
                ▲     ▲                     ▲          ▲
              ends[0] ends[1]             ends[2]    ends[3]

Thesis: a message's tokens depend on the message and on the role before it, on nothing else. ``Wording`` gives the text
of one message at a time, so appending to a conversation never changes what is already there, whatever the template does
with older turns (dropping their reasoning, for one), and no token merges across a boundary. An assistant turn ends
with its stop token, exactly as a sampled one does; the separator after it belongs to what follows. Where a template
ends a turn with the next role's token (GLM), a sampled turn has that token already and what follows does not repeat it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np
from tokenizers import Tokenizer

from opengyre.errors import ConfigError
from opengyre.proxy import keys as _keys
from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.folder import read_folder
from opengyre.proxy.formats.base import Format
from opengyre.proxy.formats.registry import FORMATS, choose
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Turn, mint_call_id
from opengyre.proxy.template import ChatTemplate
from opengyre.proxy.wording import CallNames, Wording
from opengyre.record.types import Ids

NO_BOUNDARY = -1  # an end inside a run that the template joins: nothing can be appended there
CACHED_TOKENS = 1 << 21  # 8 MiB: the system prompts and tools of a run's harnesses, and their latest messages


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids, and for each rendered message the offset at which it ends (``NO_BOUNDARY`` if it has none).

    For a tail, ``ends`` covers the messages of the tail and counts from the tail's first token.
    """

    ids: list[int]
    ends: list[int]


class Renderer:
    """A policy's tokenizer, chat template and format. Pure: the same conversation gives the same ids, always.

    ``context`` is the most tokens, prompt and reply together; ``stop_token_ids`` end a turn; ``format`` reads one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        context: int,
        stop_tokens: Sequence[int] = (),
        format: str | None = None,
    ) -> None:
        self.context = context
        self.format: Format = choose(template.source, format)
        self._tokenizer, self._wording = tokenizer, Wording(template, self.format)
        self._cache = _TokenCache(CACHED_TOKENS)
        self._fixed = lru_cache(maxsize=64)(self.encode)  # separators, generation prompts
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {i for i, t in added.items() if t.special and t.content not in self.format.markers}
        closing = self._wording.closing
        ids = self.encode(closing)
        end = next((n for n, i in enumerate(ids, 1) if i in added or i in stop_tokens), 0)  # 0: nothing ends a turn
        stop_text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        self._separator = closing.removeprefix(stop_text)
        stops = {*stop_tokens, *ids[max(0, end - 1) : end], *self._known(self.format.stops)}
        self._next_role_ends = not closing
        if self._next_role_ends:
            stops |= {first for text in self._wording.openings() for first in self.encode(text)[:1] if first in added}
        self.stop_token_ids: list[int] = sorted(stops)
        self._ended = stops | self._known(self.format.ends)
        self._cut_end = self.encode(self.format.cut_end if self.format.cut_end is not None else stop_text)

    @classmethod
    def load(cls, model_dir: Path, *, context: int | None = None, format: str | None = None) -> Renderer:
        """Read ``tokenizer.json`` and the chat template of a Hugging Face folder.

        ``context`` defaults to the model's own maximum, ``format`` to the one its template is written for. Raises
        ConfigError naming the file that is missing or broken, or the formats there are.
        """
        folder = read_folder(model_dir)
        limits = [limit for limit in (context, folder.context) if limit]
        if not limits:
            raise ConfigError("says no context length", where=str(model_dir / "config.json"), right="model.context")
        made = cls(
            folder.tokenizer, folder.template, context=min(limits), stop_tokens=folder.stop_tokens, format=format
        )
        made._check(str(model_dir), named=format is not None)
        return made

    def _check(self, where: str, *, named: bool) -> None:
        """A conversation with a tool call renders, and the call as the template writes it is read. Raises ConfigError.

        A format that was ``named`` is taken at its word: there are harnesses without tool calls.
        """
        call = ToolCall("c00000000", "ask", {"question": "why"})
        tool = Tool("ask", "Ask.", {"type": "object", "properties": {"question": {"type": "string"}}})
        turns = (Message("user", (Text("hi"),)), Message("assistant", (call,)), Message("user", (Text("so"),)))
        try:
            whole = self.render(Conversation(turns, (tool,)))
            asked = self.render(Conversation(turns[:1], (tool,))).ids
        except Refusal as refusal:
            raise ConfigError(f"cannot be rendered message by message: {refusal}", where=where) from None
        begin = next((i for i, (a, b) in enumerate(zip(asked, whole.ids, strict=False)) if a != b), len(asked))
        text = self.decode(self.without_stop(whole.ids[begin : whole.ends[1]]))
        said = self.format.read(text, opened=False, complete=True, tools=(tool,))
        if not named and said.calls != [(call.name, call.arguments)]:
            what = f"the chat template writes tool calls in a way that the format {self.format.name} does not read"
            right = f"model.format: one of {', '.join(FORMATS)}; generic goes without tool calls"
            raise ConfigError(what, where=where, right=right)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of template text; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids; special tokens other than the format's markers are left out."""
        return str(self._tokenizer.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False))

    def _known(self, tokens: Sequence[str]) -> set[int]:
        return {i for token in tokens if (i := self._tokenizer.token_to_id(token)) is not None}

    # -- conversation → ids ------------------------------------------------------------------------------------------

    def render(self, conversation: Conversation) -> Rendered:
        """The whole prompt. Raises Refusal (400) when the template rejects it."""
        if not conversation.messages:
            raise Refusal("messages: at least one message is required")
        return self._assemble(conversation, 0, [])

    def render_tail(self, conversation: Conversation, start: int, last_id: int | None = None) -> Rendered:
        """What follows recorded ids that end exactly with message ``start - 1`` and whose last token is ``last_id``.

        After an assistant turn that was cut before its stop token the tail begins with that token.
        """
        if start == 0:
            return self.render(conversation)
        if conversation.messages[start - 1].role != "assistant":
            return self._assemble(conversation, start, [])
        lead = self._cut_end if last_id is not None and last_id not in self._ended else []
        tail = self._assemble(conversation, start, [*lead, *self._fixed(self._separator)])
        if self._next_role_ends and tail.ids[:1] == [last_id] and last_id in self._ended:
            return Rendered(tail.ids[1:], [end - (end != NO_BOUNDARY) for end in tail.ends])
        return tail

    def _assemble(self, conversation: Conversation, start: int, lead: list[int]) -> Rendered:
        ids, ends = list(lead), list[int]()
        messages, thinking = conversation.messages, conversation.thinking
        i = start
        while i < len(messages):
            unit, n = self._unit(conversation, i)
            ids += unit
            ends += [NO_BOUNDARY] * (n - 1) + [len(ids)]
            i += n
            if messages[i - 1].role == "assistant":
                ids += self._fixed(self._separator)
        before = self._wording.role_of(messages[-1].role, len(messages) == 1)
        return Rendered(ids + self._fixed(self._wording.generation(before, thinking)), ends)

    def _unit(self, conversation: Conversation, i: int) -> tuple[list[int], int]:
        """(ids, number of messages): one message, a fused run of tool results, or the head and what it swallows."""
        messages, thinking = conversation.messages, conversation.thinking
        if i == 0:
            head = ("head", thinking, _keys.seed(conversation.tools), len(messages) > 1, messages[0])
            alone, both = _digest(*head), _digest(*head, messages[1:2])
            if (known := self._cache.get(alone) or self._cache.get(both)) is not None:
                return known
            text, extra = self._wording.head(messages[:2], conversation.tools, thinking)
            return self._cache.put(both if extra else alone, self._closed(text, messages[extra].role), 1 + extra)
        n = 1
        if messages[i].role == "tool" and self._wording.joins_results:
            while i + n < len(messages) and messages[i + n].role == "tool":
                n += 1
        unit, before = messages[i : i + n], self._wording.role_of(messages[i - 1].role, i == 1)
        names = self._names(messages, i, n) if messages[i].role == "tool" else {}
        key = _digest(before, thinking, unit, names)
        if (known := self._cache.get(key)) is not None:
            return known
        text = self._wording.unit(unit, before, thinking, names)
        return self._cache.put(key, self._closed(text, messages[i].role), n)

    def _closed(self, text: str, role: str) -> list[int]:
        """Ids of a message; an assistant's end with its stop token and without the separator."""
        if role != "assistant":
            return self.encode(text)
        ids = self.encode(text.removesuffix(self._separator))
        return ids if not ids or ids[-1] in self._ended else [*ids, *self._cut_end]

    def _names(self, messages: Sequence[Message], i: int, n: int) -> CallNames:
        """The calls that results ``i`` to ``i + n - 1`` answer, looked for backwards."""
        wanted = {p.call_id for m in messages[i : i + n] for p in m.parts if isinstance(p, ToolResult)}
        found: CallNames = {}
        for at in range(i - 1, -1, -1):
            calls = [p for p in messages[at].parts if isinstance(p, ToolCall)]
            if not wanted.intersection(c.call_id for c in calls):
                continue
            first = 0
            if self.format.call_id("", 0) is not None:  # the model counts its calls
                first = sum(isinstance(p, ToolCall) for m in messages[:at] for p in m.parts)
            for k, c in enumerate(calls, first):
                found[c.call_id] = (c.name, self.format.call_id(c.name, k) or c.call_id)
            wanted -= found.keys()
            if not wanted:
                break
        return found

    # -- ids → turn --------------------------------------------------------------------------------------------------

    def parse(
        self,
        ids: Sequence[int],
        finish: str,
        *,
        thinking: bool | None = None,
        after: str = "user",
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        mint: Callable[[], str] = mint_call_id,
    ) -> Turn:
        """Read sampled ids as a turn.

        ``thinking``, ``tools`` and ``stop`` (strings) are the conversation's, ``after`` is its last message's role.
        """
        complete = finish in ("stop", "stop_sequence")
        said = self.format.read(
            self.decode(self.without_stop(ids)),
            opened=self.opens_thinking(thinking, after),
            complete=complete,
            tools=tools,
            stop=stop,
        )
        parts: list[Part] = [Thinking(said.thinking)] if said.thinking else []
        parts += [Text(said.text)] if said.text else []
        parts += [ToolCall(mint(), name, arguments) for name, arguments in said.calls]
        return Turn(tuple(parts), complete and said.closed, said.malformed, said.hit)

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """``ids`` without the stop token they may end with."""
        return ids[:-1] if len(ids) and ids[-1] in self.stop_token_ids else ids

    def opens_thinking(self, thinking: bool | None, after: str = "user") -> bool:
        """True if the prompt ends inside a reasoning block, its last message being one of role ``after``."""
        return self.format.opened(self._wording.generation(after, thinking))

    def keys(self, conversation: Conversation) -> list[bytes]:
        """One chained digest per message, equal when the conversations mean the same."""
        return _keys.keys(conversation)


def _digest(*values: object) -> bytes:
    try:
        text = msgspec.msgpack.encode(values)
    except (OverflowError, ValueError):  # an integer of more than 64 bits, a lone surrogate
        text = repr(values).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=16).digest()


class _TokenCache:
    """The ids of messages rendered lately, up to a number of tokens. Used by several threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._units: OrderedDict[bytes, tuple[Ids, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> tuple[list[int], int] | None:
        with self._lock:
            if (unit := self._units.get(key)) is None:
                return None
            self._units.move_to_end(key)
        return unit[0].tolist(), unit[1]

    def put(self, key: bytes, ids: list[int], n_messages: int) -> tuple[list[int], int]:
        unit = (np.asarray(ids, np.int32), n_messages)
        with self._lock:
            self._held += len(ids) - (len(old[0]) if (old := self._units.get(key)) else 0)
            self._units[key] = unit
            while self._held > self._limit and self._units:
                self._held -= len(self._units.popitem(last=False)[1][0])
        return ids, n_messages
