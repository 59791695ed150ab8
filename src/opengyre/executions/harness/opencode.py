"""opencode, unmodified and headless (measured with 1.18.33).

    instruction ─stdin─▶ opencode run ── POST …/v1/chat/completions, or …/v1/messages ─▶ the proxy
                            │ sub-agents (tool ``task``): same process, header x-parent-session-id
                            │ compaction: a call of its own without tools, "You are a context summarization agent",
                            │   over the history as text; then "What did we do so far?", the summary, "Continue if …"
                            ▼
    the end is the process's exit

Exit code 0: the last turn ended without an error on the way; 1: there was one - it gave up (a 403 or 409, a prompt that
cannot be compacted), or a prompt was refused, compacted, and all went well after. A cut reply counts as the last turn.

It compacts when the proxy answers ``context_length_exceeded`` or "prompt is too long", and before that, when what a
call leaves of the context is less than one reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from opengyre.config import HarnessConfig
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.install import require
from opengyre.executions.options import harness_options, merged

NAME = "opencode"
REPLY_TOKENS = 32_000  # the most it asks for by itself; less where the context is small
FOLDER = ".config/opencode"
KEY = "OPENGYRE_KEY"

# What it would do besides its task: fetch its list of models, language servers and newer versions of itself.
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",  # sign-ins of vendors
}
# What it would fetch from npm into its own settings folder at every start: the types of its plugins. It looks only into
# the lock file.
_PLUGIN = {"dependencies": {"@opencode-ai/plugin": "1.18.33"}}
INSTALLED = {
    f"{FOLDER}/package.json": json.dumps(_PLUGIN),
    f"{FOLDER}/package-lock.json": json.dumps({"lockfileVersion": 3, "packages": {"": _PLUGIN}}),
    f"{FOLDER}/node_modules/.package-lock.json": "{}",
}
# Both providers are part of the program; any other would be installed from npm.
PROVIDERS = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``[harness.options]`` for ``kind = "opencode"``."""

    path: str | None = None  # the program; None: where ``opengyre harness list`` finds it
    model: str = "opengyre"  # the name it asks for
    dialect: Literal["chat", "messages"] = "chat"  # the API it speaks
    agent: str | None = None  # of its primary agents; None: build
    title: bool = False  # True: it asks for a title of the session first, a call without tools
    tools: dict[str, bool] = {}  # e.g. {"webfetch" = false}
    settings: dict[str, Any] = {}  # as in its opencode.json; wins over ours
    reply_tokens: int | None = None  # max_tokens of each call; None: sampling.max_tokens, or a quarter of the context
    compact_tokens: int | None = None  # it compacts at this many; None: one reply before the context ends
    args: list[str] = []  # further arguments


class OpenCode:
    """Starts ``opencode run`` with the instruction on stdin and its settings in the execution's home.

    Raises:
        ConfigError: not installed, another version, or an option that is none.
    """

    name = NAME

    def __init__(self, config: HarnessConfig, limits: Limits) -> None:
        self._options, self._limits = harness_options(config, Options), limits
        self._program = require(NAME, self._options.path)
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command, and its opencode.json."""
        options = self._options
        argv = [str(self._program), "run", "--format", "json", "--auto", "--model", f"opengyre/{model}"]
        argv += ["--agent", options.agent] if options.agent else []
        argv += [] if options.title else ["--title", "execution"]  # a session with a title asks for none
        settings = json.dumps(merged(self.settings(base_url, model), options.settings), indent=1)
        files = INSTALLED | {f"{FOLDER}/opencode.json": settings}
        return Launch([*argv, *options.args], QUIET | {KEY: key} | self._env, instruction, [str(self._program)], files)

    def settings(self, base_url: str, model: str) -> dict[str, Any]:
        """Its opencode.json: one provider, which waits for ever, and what it is told of the context."""
        limits, options = self._limits, self._options
        reply = options.reply_tokens or limits.reply or min(REPLY_TOKENS, limits.context // 4)
        window = {"context": limits.context, "output": reply}
        if options.compact_tokens is not None:
            window["input"] = options.compact_tokens
        forever = dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), False)
        provider = {
            "npm": PROVIDERS[options.dialect],
            "options": {"baseURL": f"{base_url}/v1", "apiKey": f"{{env:{KEY}}}", **forever},
            "models": {model: {"reasoning": True, "tool_call": True, "limit": window}},
        }
        return {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"opengyre": provider},
            "enabled_providers": ["opengyre"],
            "model": f"opengyre/{model}",
            "small_model": f"opengyre/{model}",
            "autoupdate": False,
            "share": "disabled",
            "compaction": {"auto": True, "reserved": 0},  # nothing off ``input``, where that is given
            "tools": options.tools,
        }
