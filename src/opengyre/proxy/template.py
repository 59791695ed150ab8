"""A policy's chat template, run in a sandbox: plain messages in, text out. No tokenizer here.

The environment is the one chat templates are written for: ``trim_blocks``, ``lstrip_blocks``, loop controls, a
``tojson`` that neither sorts nor escapes, ``raise_exception``, ``strftime_now``, ``{% generation %}``.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from opengyre.errors import ConfigError
from opengyre.proxy.refusals import Refusal

# What a template can throw besides its own raise_exception: it is a program fed with a harness's values.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks trained text for other trainers; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One compiled template with its special tokens (``bos_token``, ``eos_token``, ...)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        # Frozen: a date that rolls over at midnight would give every open conversation a new first message.
        env.globals["strftime_now"] = datetime.now().strftime
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(str(error), where="chat template", right="a template that Jinja can read") from None
        self.source = source
        self.no_tools: list[dict[str, Any]] | None = None  # what ``tools`` is without tools; some templates want a list
        self._tokens = special_tokens

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generate: bool = False,
        thinking: bool | None = None,
    ) -> str:
        """Render. Raises Refusal (400) when the template rejects the messages."""
        # Two names for one switch: Qwen's and GLM's, DeepSeek's and Kimi's.
        flags = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        try:
            return self._template.render(
                messages=messages, tools=tools or self.no_tools, add_generation_prompt=generate, **self._tokens, **flags
            )
        except _REFUSALS as error:
            raise Refusal(f"the chat template refuses this conversation: {error}") from error
