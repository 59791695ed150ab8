"""Conversations to token ids and back.

    [header + m0] [m1] [m2: assistant … stop] [sep + m3] … [sep] [generation prompt]      one encoding per bracket
                ▲     ▲                     ▲          ▲
              ends[0] ends[1]             ends[2]    ends[3]

Thesis: a message's tokens depend on the message alone. Each is rendered after a short stable prefix and only the
difference is kept, so appending to a conversation never changes what is already there, whatever the template does with
older turns (dropping their reasoning, for one), and no token merges across a boundary. An assistant turn ends with its
stop token, exactly as a sampled one does; the separator after it belongs to what follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from opengyre.errors import ConfigError
from opengyre.proxy import keys as _keys
from opengyre.proxy.conversation import Conversation, Message, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import MARKERS, THINK_CLOSE, THINK_OPEN, Turn, mint_call_id, read_turn
from opengyre.proxy.template import ChatTemplate

NO_BOUNDARY = -1  # an end inside a run that the template joins: nothing can be appended there

_MARK = "\u2063gyre\u2063"  # a text no template contains; finds where content ends
_USER = {"role": "user", "content": _MARK}
_SAID = {"role": "assistant", "content": _MARK}
_CALL = {"type": "function", "id": "c00000000", "function": {"name": "f", "arguments": {}}}  # nine: Mistral's ids
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# Stable prefixes a message may be rendered after; the first whose text stays a prefix is taken. A template that insists
# on alternation or on calls before results finds one further down.
_PREFIXES: tuple[list[dict[str, Any]], ...] = ([_USER], [_USER, _SAID], [_USER, _CALLED], [])


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids, and for each rendered message the offset at which it ends (``NO_BOUNDARY`` if it has none).

    For a tail, ``ends`` covers the messages of the tail and counts from the tail's first token.
    """

    ids: list[int]
    ends: list[int]


class Renderer:
    """A policy's tokenizer and chat template. Pure: the same conversation gives the same ids, always.

    ``context`` is the most tokens, prompt and reply together; ``stop_token_ids`` end a turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, context: int, stop_tokens: Sequence[int] = ()
    ) -> None:
        self.context = context
        self._tokenizer, self._template = tokenizer, template
        self._prefix = lru_cache(maxsize=64)(self._prefix_text)
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = {i for i, token in added.items() if token.special and token.content not in MARKERS}
        closing = self._closing_text()
        ids = self.encode(closing)
        ends_turn = bool(ids) and (ids[0] in added or ids[0] in stop_tokens)
        self._stop_text = tokenizer.decode(ids[:1], skip_special_tokens=False) if ends_turn else ""
        self._separator = closing.removeprefix(self._stop_text) if ends_turn else closing
        self.stop_token_ids: list[int] = sorted({*stop_tokens, *ids[: int(ends_turn)]})
        self._system_anywhere = self._takes_system_anywhere()

    @classmethod
    def load(cls, model_dir: Path, *, context: int | None = None) -> Renderer:
        """Read ``tokenizer.json`` and the chat template of a Hugging Face folder.

        ``context`` defaults to the model's own maximum. Raises ConfigError naming the file that is missing or broken.
        """
        if not (model_dir / "tokenizer.json").is_file():
            raise ConfigError("has no tokenizer.json", where=str(model_dir), right="a Hugging Face model folder")
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config, own = _json(model_dir / "config.json"), _json(model_dir / "tokenizer_config.json")
        tokens = {k: t for k, v in own.items() if k.endswith("_token") and (t := _content(v))}
        eos = _json(model_dir / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
        stops = {i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)}
        if (i := tokenizer.token_to_id(tokens.get("eos_token", ""))) is not None:
            stops.add(i)
        limit = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
        if not (context or limit):
            raise ConfigError("says no context length", where=str(model_dir / "config.json"), right="model.context")
        template = ChatTemplate(_template_source(model_dir, own), tokens)
        return cls(tokenizer, template, context=min(filter(None, (context, limit))), stop_tokens=sorted(stops))

    # -- tokens ------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of template text; special tokens in it are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids; special tokens other than the reasoning and tool-call markers are left out."""
        return str(self._tokenizer.decode([i for i in ids if i not in self._hidden], skip_special_tokens=False))

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
        lead: list[int] = []
        if conversation.messages[start - 1].role == "assistant":
            if last_id is not None and last_id not in self.stop_token_ids:
                lead += self.encode(self._stop_text)
            lead += self.encode(self._separator)
        return self._assemble(conversation, start, lead)

    def _assemble(self, conversation: Conversation, start: int, lead: list[int]) -> Rendered:
        ids, ends = list(lead), []
        messages, names = conversation.messages, _tool_names(conversation)
        i = start
        while i < len(messages):
            text, n = self._unit(conversation, i, names)
            ids += self.encode(text)
            ends += [NO_BOUNDARY] * (n - 1) + [len(ids)]
            i += n
            if messages[i - 1].role == "assistant":
                ids += self.encode(self._separator)
        return Rendered(ids + self.encode(self._generation_prompt(conversation.thinking)), ends)

    def _unit(self, conversation: Conversation, i: int, names: dict[str, str]) -> tuple[str, int]:
        """(text, number of messages): one message, a run of tool results, or what the template fuses with its head."""
        messages = conversation.messages
        n = 1
        if messages[i].role == "tool":
            while i + n < len(messages) and messages[i + n].role == "tool":
                n += 1
        unit = [self._plain(m, names, first=i == 0) for m in messages[i : i + n]]
        if i > 0:
            text = self._difference(unit, conversation.thinking)
        else:
            text, extra = self._head(conversation, unit, names)
            n += extra
        return (text.removesuffix(self._separator) if messages[i + n - 1].role == "assistant" else text), n

    def _head(self, conversation: Conversation, unit: list[dict[str, Any]], names: dict[str, str]) -> tuple[str, int]:
        """Everything up to the end of message 0 (tools stand here), and how many further messages it swallowed."""
        tools, thinking = [_tool(t) for t in conversation.tools], conversation.thinking
        following = [self._plain(m, names) for m in conversation.messages[1:2]]
        try:
            text = self._template.text(unit, tools=tools, thinking=thinking)
            if not tools or conversation.tools[-1].name in text or not following:
                return text, 0
            return self._template.text([*unit, *following], tools=tools, thinking=thinking), 1  # tools beside the user
        except Refusal:
            if unit[0]["role"] != "system":
                raise
        # The template wants a user turn after the system message: render with one, and take it off again if we can.
        whole = self._template.text([*unit, _USER], tools=tools, thinking=thinking)
        user = self._difference([_USER], thinking)
        if whole.endswith(user):
            return whole.removesuffix(user), 0
        if not following:
            return whole, 0
        return self._template.text([*unit, *following], tools=tools, thinking=thinking), 1

    def _difference(self, unit: list[dict[str, Any]], thinking: bool | None) -> str:
        """What ``unit`` adds after the first prefix that it leaves unchanged."""
        refusal: Refusal | None = None
        for n, messages in enumerate(_PREFIXES):
            prefix = self._prefix(n, thinking)
            if prefix is None:
                continue
            try:
                text = self._template.text([*messages, *unit], thinking=thinking)
            except Refusal as error:
                refusal = error
                continue
            if text.startswith(prefix):
                return text[len(prefix) :]
        raise refusal or Refusal(f"the chat template cannot append a {unit[0]['role']} message")

    def _prefix_text(self, n: int, thinking: bool | None) -> str | None:
        try:
            return self._template.text(_PREFIXES[n], thinking=thinking) if _PREFIXES[n] else ""
        except Refusal:
            return None

    def _generation_prompt(self, thinking: bool | None) -> str:
        prefix = self._prefix(0, thinking)
        if prefix is None:
            raise Refusal("the chat template refuses a user message")
        return self._template.text([_USER], generate=True, thinking=thinking).removeprefix(prefix)

    def _plain(self, message: Message, names: dict[str, str], *, first: bool = False) -> dict[str, Any]:
        """A message as templates know it."""
        match message.role:
            case "assistant":
                return _assistant(message)
            case "tool":
                (result,) = (p for p in message.parts if isinstance(p, ToolResult))
                name = names.get(result.call_id, "")
                return {"role": "tool", "content": result.text, "tool_call_id": result.call_id, "name": name}
        text = _blocks(message)
        if message.role == "system" and not first and not self._system_anywhere:
            return {"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
        return {"role": message.role, "content": text}

    def _closing_text(self) -> str:
        """What the template writes after an assistant's content."""
        for n, messages in enumerate(_PREFIXES[:2]):
            try:
                text = self._template.text([*messages, _SAID])
            except Refusal:
                continue
            if _MARK in text and (n or text.count(_MARK) == 2):
                return text[text.rfind(_MARK) + len(_MARK) :]
        raise ConfigError("cannot render a user turn and a reply", where="chat template")

    def _takes_system_anywhere(self) -> bool:
        system = {"role": "system", "content": "reminder"}
        try:
            return "reminder" in self._difference([system], None)
        except Refusal:
            return False

    # -- ids → turn --------------------------------------------------------------------------------------------------

    def parse(
        self,
        ids: Sequence[int],
        finish: str,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        mint: Callable[[], str] = mint_call_id,
    ) -> Turn:
        """Read sampled ids as a turn. ``thinking``, ``tools`` and ``stop`` (strings) are the conversation's."""
        return read_turn(
            self.decode(self.without_stop(ids)),
            complete=finish in ("stop", "stop_sequence"),
            thinking_open=self.opens_thinking(thinking),
            tools=tools,
            stop=stop,
            mint=mint,
        )

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """``ids`` without the stop token they may end with."""
        return ids[:-1] if len(ids) and ids[-1] in self.stop_token_ids else ids

    def opens_thinking(self, thinking: bool | None) -> bool:
        """True if the generation prompt ends inside a reasoning block."""
        _, opened, inside = self._generation_prompt(thinking).rpartition(THINK_OPEN)
        return bool(opened) and THINK_CLOSE not in inside

    def keys(self, conversation: Conversation) -> list[bytes]:
        """One chained digest per message, equal when the conversations mean the same."""
        return _keys.keys(conversation)


def _assistant(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(p.text for p in message.parts if isinstance(p, Text)),
    }
    if thought := "\n".join(p.text for p in message.parts if isinstance(p, Thinking) and p.text):
        plain["reasoning_content"] = thought
    if calls := [p for p in message.parts if isinstance(p, ToolCall)]:
        plain["tool_calls"] = [
            {"type": "function", "id": c.call_id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    return plain


def _blocks(message: Message) -> str:
    """Text blocks of a harness turn, each on lines of its own: a reminder must not run into the prompt after it."""
    text = ""
    for part in message.parts:
        if isinstance(part, Text):
            text += ("\n" if text and not text.endswith("\n") else "") + part.text
    return text


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _tool_names(conversation: Conversation) -> dict[str, str]:
    return {p.call_id: p.name for m in conversation.messages for p in m.parts if isinstance(p, ToolCall)}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(error), where=str(path), right="JSON") from None
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    """A special token is a string or {"content": ...}."""
    return token.get("content", "") if isinstance(token, dict) else token if isinstance(token, str) else ""


def _template_source(model_dir: Path, own: dict[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = own.get("chat_template")
    if isinstance(source, list):  # several named ones; the tool-aware one serves plain chats too
        named = {t["name"]: t["template"] for t in source}
        source = named.get("tool_use") or named.get("default")
    if not isinstance(source, str):
        raise ConfigError("has no chat template", where=str(model_dir), right="chat_template.jinja")
    return source
