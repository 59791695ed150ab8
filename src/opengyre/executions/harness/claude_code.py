"""Claude Code, unmodified and headless (measured with 2.1.220).

    instruction ─stdin─▶ claude -p ── POST …/v1/messages?beta=true ─▶ the proxy
                            │ sub-agents: same process, own connections, header x-claude-code-agent-id
                            │ compaction: the history plus a last text "CRITICAL: Respond with TEXT ONLY. …"
                            ▼
    the end is the process's exit: with background sub-agents it prints several ``result`` events before

Exit code 0: the last turn ended; 1: it gave up (a refused prompt that cannot be compacted, a stream cut inside a turn,
a 403 or 409); others are signals. None of them says whether the task was solved.

It compacts when the proxy answers "prompt is too long", and before that, by the usage it is told, if the context is
large enough for the room it keeps free; see ``compaction``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from opengyre.config import HarnessConfig
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.install import require
from opengyre.executions.options import harness_options

NAME = "claude_code"
REPLY_TOKENS = 32_000  # what it asks for by itself; less where the context is small
RESERVED_TOKENS = 13_000  # it compacts so far before the end of its window, besides the room for a reply
RESERVED_REPLY = 20_000  # the most of the reply it counts in that
FOREVER_MS = 24 * 3600 * 1000  # the execution's own deadline ends a wait, never the client's

# What it would do besides its task: say so to its maker, fetch news, replace itself.
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no title, feature-flag or marketplace calls
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
}
# Waiting is ours to bound: a cell may switch, a queue may be long. The proxy sends pings, which its watchdog ignores.
PATIENT = {
    "API_TIMEOUT_MS": str(FOREVER_MS),  # for the response's head
    "API_FORCE_IDLE_TIMEOUT": "0",  # else the runtime drops a socket that is silent for 300 s
    "CLAUDE_ENABLE_STREAM_WATCHDOG": "0",  # else 300 s of pings end the run
    "CLAUDE_CODE_MAX_RETRIES": "15",  # the most it accepts; about 6 minutes of refused connections
}


PermissionMode = Literal["bypassPermissions", "dontAsk", "acceptEdits", "auto", "plan", "manual"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``[harness.options]`` for ``kind = "claude_code"``."""

    path: str | None = None  # the program; None: where ``opengyre harness list`` finds it
    model: str = "opengyre"  # the name it asks for; a name it knows selects another prompt, see docs/harnesses.md
    bare: bool = False  # its minimal mode: 3 tools and a short prompt, no sub-agents, no CLAUDE.md
    tools: list[str] | None = None  # of its built-in tools, those offered; None: all
    disallowed_tools: list[str] = []  # e.g. ["WebFetch", "Bash(git push *)"]
    permission_mode: PermissionMode = "bypassPermissions"  # dontAsk: what is not allowed is refused
    allowed_tools: list[str] = []  # beside those of ``settings``, where permissions are not bypassed
    settings: dict[str, Any] = {}  # as in its settings.json: permissions, hooks, env, …
    max_turns: Positive | None = None  # of the main agent
    thinking: bool = True  # False: it asks for none
    reply_tokens: Positive | None = None  # max_tokens of a call; None: sampling.max_tokens, or context / 4
    compact_tokens: NotNegative | None = None  # where it compacts; None: near model.context; 0: only when refused
    args: list[str] = []  # further arguments, e.g. ["--append-system-prompt", "…"]


class ClaudeCode:
    """Starts ``claude -p`` with the instruction on stdin.

    Raises:
        ConfigError: not installed, another version, or an option that is none.
    """

    name = NAME

    def __init__(self, config: HarnessConfig, limits: Limits) -> None:
        self._options, self._limits = harness_options(config, Options), limits
        self._program = require(NAME, self._options.path)
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command; nothing on it differs between executions."""
        options = self._options
        argv = [str(self._program), "--print", "--output-format", "stream-json", "--verbose"]
        argv += ["--permission-mode", options.permission_mode]
        argv += ["--bare"] if options.bare else []
        argv += [] if options.tools is None else ["--tools", ",".join(options.tools)]
        argv += ["--allowedTools", ",".join(options.allowed_tools)] if options.allowed_tools else []
        argv += ["--disallowedTools", ",".join(options.disallowed_tools)] if options.disallowed_tools else []
        argv += ["--settings", json.dumps(options.settings)] if options.settings else []
        argv += [] if options.max_turns is None else ["--max-turns", str(options.max_turns)]
        env = self._environment(base_url, key, model) | self._env
        return Launch([*argv, *options.args], env, instruction, [str(self._program)])

    def _environment(self, base_url: str, key: str, model: str) -> dict[str, str]:
        names = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *_DEFAULT_MODELS)
        env = {
            "ANTHROPIC_BASE_URL": base_url,
            # Bare mode reads no other; with both set both would be sent.
            "ANTHROPIC_API_KEY" if self._options.bare else "ANTHROPIC_AUTH_TOKEN": key,
            **dict.fromkeys(names, model),  # some sub-agents ask for a model of their own otherwise
            "IS_SANDBOX": "1",  # bypassing permissions as root is refused without
            **QUIET,
            **PATIENT,
            **compaction(self._limits, self._options),
        }
        return env if self._options.thinking else env | {"CLAUDE_CODE_DISABLE_THINKING": "1"}


_DEFAULT_MODELS = tuple(f"ANTHROPIC_DEFAULT_{family}_MODEL" for family in ("OPUS", "SONNET", "HAIKU", "FABLE"))


def compaction(limits: Limits, options: Options) -> dict[str, str]:
    """What it is told of the context: how much to ask for, and the window near whose end it compacts.

    It keeps 13,000 tokens and the room for a reply free. Where that is more than half of the context it would compact
    all the time; there it is told nothing and compacts when a prompt is refused.
    """
    reply = options.reply_tokens or limits.reply or min(REPLY_TOKENS, limits.context // 4)
    window = limits.context if options.compact_tokens is None else min(options.compact_tokens, limits.context)
    env = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(reply)}
    if window - RESERVED_TOKENS - min(reply, RESERVED_REPLY) < window / 2:
        return env
    both = ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "CLAUDE_CODE_MAX_CONTEXT_TOKENS")
    return env | dict.fromkeys(both, str(window))
