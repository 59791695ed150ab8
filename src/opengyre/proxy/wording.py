"""What a chat template makes of one message at a time, and what it can and cannot say. Text only, no tokens.

    context ─▶ text                     The difference is the message's text. A context is a short conversation that
    context + message ─▶ text + more    ends with the role that stands before the message, or else another; the first
                                        whose text the message leaves unchanged is taken.

Templates drop old reasoning, fuse tool results into one turn, insist on alternation, want arguments as text, know no
tools or no system message. All this is found out by trying, once, with marked texts; what a template cannot say is said
in the format's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from opengyre.errors import ConfigError
from opengyre.proxy.conversation import Message, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.formats.base import Format, dump
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.template import ChatTemplate

Plain = dict[str, Any]  # a message as templates know it
CallNames = dict[str, tuple[str, str]]  # call id → (tool name, the id that the template is shown)

_MARK = "\u2063gyre\u2063"  # a text no template contains; finds where content ends
_KEY, _NAME = "gyre_key", "gyre_tool"  # likewise, as names
_CALL_ID = "c00000000"  # nine characters: Mistral's ids
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the first a template writes is taken
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
_TOOL = Tool(_NAME, _MARK, {"type": "object", "properties": {_KEY: {"type": "string", "description": _MARK}}})


class Wording:
    """One template's texts. Pure: every answer depends on the arguments alone."""

    def __init__(self, template: ChatTemplate, fmt: Format) -> None:
        self._template, self._format = template, fmt
        self._content: Callable[[str], Any] = str
        self._end = ""  # what the template writes behind a conversation that no reply is asked for
        self._take_conventions()
        self._contexts = lru_cache(maxsize=64)(self._contexts_of)
        self.generation = lru_cache(maxsize=16)(self._generation)
        self.role_of = lru_cache(maxsize=16)(self._role_of)
        self._can_write = lru_cache(maxsize=16)(self._can_write)  # type: ignore[method-assign]
        self._takes_system = lru_cache(maxsize=16)(self._takes_system)  # type: ignore[method-assign]
        self._tools_place = lru_cache(maxsize=16)(self._tools_place)  # type: ignore[method-assign]
        self._system_place = lru_cache(maxsize=1)(self._system_place)  # type: ignore[method-assign]
        self.closing = self._closing()
        self._reasoning_key = next((key for key in _REASONING_KEYS if self._writes_reasoning(key)), None)
        self._call_style: tuple[bool, str | None] | None = None
        for style in ((False, ""), (True, ""), (False, None), (True, None)):
            self._call_style = style
            if self._can_write(False, 1):
                break
            self._can_write.cache_clear()  # type: ignore[attr-defined]
        else:
            self._call_style = None
        self._contexts.cache_clear()
        self._writes_results, self.joins_results, self.names_results = self._results()

    # -- one message -------------------------------------------------------------------------------------------------

    def unit(self, messages: Sequence[Message], before: str, thinking: bool | None, names: CallNames) -> str:
        """The text of a message, or of a run of tool results, that stands after a message with role ``before``.

        Raises Refusal when the template cannot append it anywhere.
        """
        first = messages[0]
        if (written := self._format.write(first)) is not None:
            return written
        plain = [self._plain(m, before, names) for m in messages]
        calls: tuple[tuple[str, str], ...] = ()
        if plain[0]["role"] == "tool" and self._call_style is not None:
            known = [names.get(_result(m).call_id) for m in messages] if self.names_results else [None]
            calls = tuple(pair or (_NAME, _CALL_ID) for pair in known)
        return self._difference(plain, before, thinking, calls)

    def head(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None) -> tuple[str, int]:
        """Everything up to the end of the first message (tools stand here), and how many messages more it swallowed.

        ``messages``: the first one, and the second if there is one.
        """
        try:
            return self._head(messages, tools, thinking)
        except Refusal:
            whole = [replace(tool, parameters={**_NO_PARAMETERS, **tool.parameters}) for tool in tools]
            if whole == list(tools):
                raise
            return self._head(messages, whole, thinking)  # some templates go over properties without asking

    def _head(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None) -> tuple[str, int]:
        first, *following = messages
        plain = self._plain(first, "", {})
        place = self._tools_place(plain["role"]) if tools else "alone"
        shown = [_tool(tool) for tool in tools]
        if place == "nowhere":
            plain["content"], shown = self._content(self._with_tools(_blocks(first), tools)), []
        system_place = self._system_place() if plain["role"] == "system" else "alone"
        if "beside" in (place, system_place) and following:  # the template writes it into the user turn
            return self._text(self._pair(plain, following[0]), tools=shown, thinking=thinking), 1
        try:
            return self._text([plain], tools=shown, thinking=thinking), 0
        except Refusal:
            if plain["role"] != "system":
                raise
        # The template wants a user turn after the system message: render with one, and take it off again if we can.
        whole = self._text([plain, self._user()], tools=shown, thinking=thinking)
        user = self._difference([self._user()], "user", thinking)
        if whole.endswith(user):
            return whole.removesuffix(user), 0
        if not following:
            raise Refusal("the chat template wants a user message")
        return self._text(self._pair(plain, following[0]), tools=shown, thinking=thinking), 1

    def _pair(self, plain: Plain, following: Message) -> list[Plain]:
        return [plain, self._plain(following, plain["role"], {})]

    def _generation(self, before: str, thinking: bool | None) -> str:
        """What makes the model answer after a message with role ``before``."""
        for context in (self._contexts(before)[0], self._contexts("user")[0]):
            if (prefix := self._prefix(context, thinking)) is None:
                continue
            text = self._template.text(list(context.messages), generate=True, thinking=thinking)
            if text.startswith(prefix):
                return text[len(prefix) :]
        raise Refusal("the chat template refuses a user message")

    def _role_of(self, role: str, first: bool) -> str:
        """The role a message comes out with: the template may know no system message there, or no tool results."""
        if role == "system" and self._format.write(Message(role, ())) is None:
            return "system" if self._takes_system("" if first else "user") else "user"
        return "user" if role == "tool" and not self._writes_results else role

    def openings(self) -> list[str]:
        """What user turns and tool results after an assistant turn begin with."""
        texts = []
        for message in (Message("user", (Text(_MARK),)), Message("tool", (ToolResult(_CALL_ID, _MARK),))):
            try:
                text = self.unit([message], "assistant", None, {})
            except Refusal:
                continue
            texts.append(text.partition(_MARK)[0])
        return texts

    # -- messages as templates know them -------------------------------------------------------------------------------

    def _plain(self, message: Message, before: str, names: CallNames) -> Plain:
        match message.role:
            case "assistant":
                return self._assistant(message)
            case "tool":
                result = _result(message)
                if not self._writes_results:
                    text = f"<tool_response>\n{result.text}\n</tool_response>"
                    return {"role": "user", "content": self._content(text)}
                name, call_id = names.get(result.call_id, ("", result.call_id))
                content = self._content(result.text)
                return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}
        text, role = _blocks(message), message.role
        if role == "system" and not self._takes_system(before):
            role = "user"
            text = f"<system-reminder>\n{text}\n</system-reminder>" if before else text
        return {"role": role, "content": self._content(text)}

    def _assistant(self, message: Message) -> Plain:
        text = "".join(p.text for p in message.parts if isinstance(p, Text))
        calls = [p for p in message.parts if isinstance(p, ToolCall)]
        plain: Plain = {"role": "assistant", "content": text}
        thought = "\n".join(p.text for p in message.parts if isinstance(p, Thinking) and p.text)
        if thought and self._reasoning_key:
            plain[self._reasoning_key] = thought
        if not calls:
            return {**plain, "content": self._content(text)}
        if self._call_style is None or not self._can_write(bool(text), min(len(calls), 2)):
            written = self._format.write_calls([(c.name, c.arguments) for c in calls])
            return {**plain, "content": self._content(f"{text}\n{written}" if text else written)}
        as_text, empty = self._call_style
        plain["content"] = self._content(text) if text else empty
        plain["tool_calls"] = [_call(c.call_id, c.name, dump(c.arguments) if as_text else c.arguments) for c in calls]
        return plain

    def _with_tools(self, text: str, tools: Sequence[Tool]) -> str:
        """A first message that says what the template has no place for."""
        example = self._format.write_calls([("name", {"parameter": "value"})])
        lines = "\n".join(dump(_tool(tool)) for tool in tools)
        return (
            f"{text}\n\n# Tools\n\nThese functions can be called:\n{lines}\n\nA call is written like this:\n{example}"
        )

    def _user(self) -> Plain:
        return {"role": "user", "content": self._content(_MARK)}

    def _said(self) -> Plain:
        return {"role": "assistant", "content": self._content(_MARK)}

    def _called(self, calls: Sequence[tuple[str, str]]) -> Plain:
        parts = tuple(ToolCall(shown, name, {_KEY: _MARK}) for name, shown in calls)
        return self._assistant(Message("assistant", parts))

    # -- differences ---------------------------------------------------------------------------------------------------

    def _contexts_of(self, before: str, calls: tuple[tuple[str, str], ...] = ()) -> list[_Context]:
        """Conversations that end like the one a message stands in, then others that a strict template may take."""
        user, said = (self._user(),), (self._user(), self._said())
        called = (*user, self._called(calls or ((_NAME, _CALL_ID),))) if self._call_style is not None else said
        result = {"role": "tool", "content": self._content(_MARK), "tool_call_id": _CALL_ID, "name": _NAME}
        if calls:
            order = [called, user, said]
        elif before == "system":
            order = [({"role": "system", "content": self._content(_MARK)},), user, said, called]
        elif before == "assistant":
            order = [said, user, called]
        elif before == "tool" and called is not said:
            order = [(*called, result), user, said, called]
        else:
            order = [user, said, called]
        return [_Context(messages) for messages in order]

    def _difference(
        self, unit: list[Plain], before: str, thinking: bool | None, calls: tuple[tuple[str, str], ...] = ()
    ) -> str:
        refusal: Refusal | None = None
        for context in self._contexts(before, calls):
            if (prefix := self._prefix(context, thinking)) is None:
                continue
            try:
                text = self._text([*context.messages, *unit], thinking=thinking)
            except Refusal as error:
                refusal = error
                continue
            if text.startswith(prefix):
                return text[len(prefix) :]
        raise refusal or Refusal(f"the chat template cannot append a {unit[0]['role']} message")

    def _text(self, messages: list[Plain], *, tools: list[Plain] | None = None, thinking: bool | None = None) -> str:
        """A conversation that is not asked for a reply, without what stands behind the last message."""
        return self._template.text(messages, tools=tools, thinking=thinking).removesuffix(self._end)

    def _prefix(self, context: _Context, thinking: bool | None) -> str | None:
        if thinking not in context.texts:
            try:
                context.texts[thinking] = self._text(list(context.messages), thinking=thinking)
            except Refusal:
                context.texts[thinking] = None
        return context.texts[thinking]

    # -- what the template can say -------------------------------------------------------------------------------------

    def _take_conventions(self) -> None:
        """Find out how it wants content, what it wants for no tools, and what it writes at the very end."""
        if not self._shows([_user()]):
            if self._shows([{"role": "user", "content": _parts(_MARK)}]):
                self._content = _parts  # a template for images too: content is always a list
            elif self._shows([_user()], tools=[_tool(_TOOL)]):
                self._template.no_tools = []  # it goes over the tools without asking whether there are any
        try:
            one, two = (self._template.text(m) for m in ([self._user()], [self._user(), self._said()]))
        except Refusal:
            return
        if not two.startswith(one):
            same = next(i for i, (a, b) in enumerate(zip(one, f"{two}\0", strict=False)) if a != b)
            self._end = one[same:] if two.endswith(one[same:]) else ""

    def _shows(self, messages: list[Plain], *texts: str, tools: list[Plain] | None = None) -> bool:
        try:
            text = self._text(messages, tools=tools)
        except Refusal:
            return False
        return all(t in text for t in (texts or (_MARK,)))

    def _closing(self) -> str:
        """What the template writes after an assistant's content."""
        try:
            text = self._text([self._user(), self._said()])
        except Refusal as error:
            raise ConfigError(f"cannot render a user turn and a reply: {error}", where="chat template") from None
        if text.count(_MARK) < 2:
            raise ConfigError("leaves out a user turn or a reply", where="chat template")
        return text[text.rfind(_MARK) + len(_MARK) :]

    def _writes_reasoning(self, key: str) -> bool:
        return self._shows([self._user(), {**self._said(), key: _NAME}], _NAME)

    def _can_write(self, with_text: bool, n_calls: int) -> bool:
        """Whether a turn with so many calls (2: several), and with words beside them, comes out whole."""
        as_text, empty = self._call_style or (False, "")
        calls = [
            _call(f"c0000000{i}", f"{_NAME}_{i}", dump({_KEY: _MARK}) if as_text else {_KEY: _MARK})
            for i in range(n_calls)
        ]
        content = self._content("gyre_words") if with_text else empty
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            text = self._text([self._user(), message])
        except Refusal:
            return False
        after = text[text.find(_MARK) + len(_MARK) :]
        broken = f"{{'{_KEY}" in text or f'\\"{_KEY}' in text  # Python's dict, or text in text
        names = all(f"{_NAME}_{i}" in after for i in range(n_calls))
        return names and not broken and after.count(_KEY) >= n_calls and (not with_text or "gyre_words" in after)

    def _results(self) -> tuple[bool, bool, bool]:
        """(tool results are written, several are fused into one turn, they say which call they answer)."""
        self._writes_results, self.names_results = True, True

        def text(*pairs: tuple[str, str]) -> str:
            messages = [Message("tool", (ToolResult(call_id, _MARK),)) for _, call_id in pairs]
            return self.unit(messages, "assistant", None, {call_id: (name, call_id) for name, call_id in pairs})

        one, other = (_NAME, _CALL_ID), ("other_tool", "d00000000")
        try:
            single = text(one)
        except Refusal:
            return False, False, False
        if _MARK not in single:
            return False, False, False
        try:
            return True, text(one, other) != single + text(other), text(other) != single
        except Refusal:
            return True, False, True

    def _takes_system(self, before: str) -> bool:
        """Whether a system message may stand after ``before`` (empty: first)."""
        message = {"role": "system", "content": self._content(_NAME)}
        if not before:
            return self._shows([message], _NAME) or self._shows([message, self._user()], _NAME)
        try:
            return _NAME in self._difference([message], before, None)
        except Refusal:
            return False

    def _system_place(self) -> str:
        """Where a first system message stands: alone, or beside the user's turn."""
        system = {"role": "system", "content": self._content(_NAME)}
        if self._shows([system], _NAME) or not self._shows([system, self._user()], _NAME):
            return "alone"
        try:
            self._text([system])
        except Refusal:
            return "alone"  # it is rendered with a user turn, which is taken off again
        return "beside"

    def _tools_place(self, role: str) -> str:
        """Where tools stand if the first message has ``role``: alone (with it), beside (the user's turn), nowhere."""
        first, tools = {"role": role, "content": self._content("first")}, [_tool(_TOOL)]
        if self._shows([first], _NAME, tools=tools):
            return "alone"
        if self._shows([first, self._user()], _NAME, tools=tools):
            try:
                self._text([first], tools=tools)
            except Refusal:
                return "alone"  # it is rendered with a user turn, which is taken off again
            return "beside"
        return "nowhere"


@dataclass(eq=False)
class _Context:
    """A conversation that a message is rendered after, and its own text for each thinking switch (None: refused)."""

    messages: tuple[Plain, ...]
    texts: dict[bool | None, str | None] = field(default_factory=dict)


def _user() -> Plain:
    return {"role": "user", "content": _MARK}


def _parts(text: str) -> list[Plain]:
    return [{"type": "text", "text": text}]


def _call(call_id: str, name: str, arguments: Any) -> Plain:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _tool(tool: Tool) -> Plain:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _result(message: Message) -> ToolResult:
    (result,) = (p for p in message.parts if isinstance(p, ToolResult))
    return result


def _blocks(message: Message) -> str:
    """Text blocks of a harness turn, each on lines of its own: a reminder must not run into the prompt after it."""
    text = ""
    for part in message.parts:
        if isinstance(part, Text):
            text += ("\n" if text and not text.endswith("\n") else "") + part.text
    return text
