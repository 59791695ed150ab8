"""OpenAI's Harmony: a turn is several messages, each with a channel, calls with a recipient.

    <|start|>assistant <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant <|channel|>commentary<|message|> words before a call <|end|>
    <|start|>assistant <|channel|>commentary to=functions.f <|constrain|>json<|message|> {…} <|call|>
    <|start|>assistant <|channel|>final<|message|> words <|return|>

The prompt ends with ``<|start|>assistant``. Templates of the family drop the reasoning of older turns, know one call a
turn and no system message after the first, so assistant turns and later system messages are written here. The format:
https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from opengyre.proxy.conversation import Message, Text, Thinking, Tool, ToolCall
from opengyre.proxy.formats.base import Format, NamedCall, Said, cut_at, dump, held, json_at

_START, _END, _CALL, _RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CLOSES = (_END, _CALL, _RETURN, _START, _CHANNEL)  # the last two: a message whose end was forgotten
_NEXT = re.compile("|".join(map(re.escape, _CLOSES)))
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*([a-z]+)")


def _header(header: str) -> tuple[str, str | None]:
    """(kind, recipient): kind is thinking, text or call."""
    if (to := _RECIPIENT.search(header)) is not None:
        return "call", to[1].removeprefix("functions.")
    channel = _CHANNEL_NAME.search(header)
    return ("thinking" if channel is not None and channel[1] == "analysis" else "text"), None


class Harmony(Format):
    """Channels, recipients and three ways to end a message."""

    name = "harmony"
    markers = (_START, _END, _CALL, _RETURN, _CHANNEL, _MESSAGE, "<|constrain|>")
    stops = (_CALL, _RETURN)
    ends = (_END, _CALL, _RETURN)
    cut_end = _END

    def speaks(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def opened(self, generation: str) -> bool:
        return generation.endswith(_ANALYSIS)

    def read(
        self, text: str, *, opened: bool, complete: bool, tools: Sequence[Tool] = (), stop: Sequence[str] = ()
    ) -> Said:
        thinking, words, calls = list[str](), list[str](), list[NamedCall]()
        malformed, closed = 0, True
        for header, body, ended in _messages(f"{_ANALYSIS}{text}" if opened else text):
            kind, recipient = _header(header)
            whole = ended or complete
            if kind == "thinking":
                thinking.append(body)
                closed = whole
                continue
            closed = True
            call = _call(recipient, body) if kind == "call" and whole else None
            if call is not None:
                calls.append(call)
                continue
            malformed += kind == "call"
            words.append(body)
        said, hit = cut_at(_join(words), stop)
        return Said(_join(thinking), said, calls, malformed, closed, hit)

    def release(self, *, opened: bool, stop: Sequence[str] = ()) -> HarmonyRelease:
        return HarmonyRelease([s for s in stop if s], opened=opened)

    def write_calls(self, calls: Sequence[NamedCall]) -> str:
        # The recipient stands before the channel, as the family's template has it.
        return "".join(
            f"{_START}assistant to=functions.{name}{_CHANNEL}commentary json{_MESSAGE}{dump(arguments)}{_CALL}"
            for name, arguments in calls
        )

    def write(self, message: Message) -> str | None:
        if message.role == "system":
            return f"{_START}developer{_MESSAGE}{message.text}{_END}"
        if message.role != "assistant":
            return None
        calls = [(p.name, p.arguments) for p in message.parts if isinstance(p, ToolCall)]
        thinking = [p.text for p in message.parts if isinstance(p, Thinking)]
        words = "".join(p.text for p in message.parts if isinstance(p, Text))
        text = "".join(f"{_START}assistant{_ANALYSIS}{t}{_END}" for t in thinking if t)
        if words or not calls:
            channel = "commentary" if calls else "final"
            text += f"{_START}assistant{_CHANNEL}{channel}{_MESSAGE}{words}{_END}"
        return text + self.write_calls(calls)


def _call(name: str | None, body: str) -> NamedCall | None:
    found = json_at(body, 0)
    if not name or found is None or body[found[1] :].strip() or not isinstance(found[0], dict):
        return None
    return name, found[0]


def _messages(text: str) -> list[tuple[str, str, bool]]:
    """(header, body, whether it was ended) of each message. Words without any header are a body."""
    found, at = list[tuple[str, str, bool]](), 0
    while at < len(text):
        begin = text.find(_MESSAGE, at)
        header = text[at:begin] if begin >= 0 else ""
        if begin < 0:
            rest = text[at:]
            if not found and rest.strip() and not any(m in rest for m in _CLOSES):
                found.append(("", rest, False))
            break
        end = _NEXT.search(text, begin + len(_MESSAGE))
        stop = end.start() if end else len(text)
        found.append((header, text[begin + len(_MESSAGE) : stop], end is not None))
        at = end.end() if end and end[0] not in (_CHANNEL, _START) else stop
    return found


def _join(bodies: Sequence[str]) -> str:
    """Bodies of one kind, each on lines of its own."""
    return "\n".join(s for body in bodies if (s := body.strip("\n")) and not s.isspace())


class HarmonyRelease:
    """Reasoning and words as far as they are certain. Reasoning after words, and all after a call, waits.

    header ─▶ body ─▶ header …          header: up to ``<|message|>``; body: up to whatever ends a message
    """

    def __init__(self, stop: Sequence[str], *, opened: bool) -> None:
        self._stop = stop
        self._buffer = _ANALYSIS if opened else ""
        self._kind = ""  # empty: reading a header
        self._last = ""  # kind of what was released last
        self._fresh = True  # nothing of this body was released
        self._closed = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        self._buffer += text
        deltas = []
        while not self._closed and (delta := self._step()) is not None:
            if delta[1]:
                deltas.append(delta)
        return deltas

    def _step(self) -> tuple[str, str] | None:
        if not self._kind:
            begin = self._buffer.find(_MESSAGE)
            if begin < 0:
                return None
            self._kind, _ = _header(self._buffer[:begin])
            self._buffer, self._fresh = self._buffer[begin + len(_MESSAGE) :], True
            self._closed = self._kind == "call" or (self._kind == "thinking" and self._last == "text")
            return "", ""
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        ends = (*_CLOSES, *self._stop) if self._kind == "text" else _CLOSES
        at, end = min(((i, e) for e in ends if (i := self._buffer.find(e)) >= 0), default=(-1, ""))
        if at < 0:
            certain = self._buffer[: len(self._buffer) - held(self._buffer, ends)].rstrip()
            return self._give(certain) if certain else None
        if end in self._stop:
            self._closed = True
            return self._give(self._buffer[:at].rstrip())
        body = self._buffer[:at].rstrip("\n")
        given = self._give("" if self._fresh and not body.strip() else body)
        at = self._buffer.find(end)
        self._buffer = self._buffer[at if end in (_CHANNEL, _START) else at + len(end) :]
        self._kind = ""
        return given

    def _give(self, text: str) -> tuple[str, str]:
        """Take ``text`` from the buffer."""
        self._buffer = self._buffer[len(text) :]
        kind = self._kind
        if text:
            text = f"\n{text}" if self._fresh and self._last == kind else text
            self._fresh, self._last = False, kind
        return kind, text
