"""Codex, unmodified and headless (measured with 0.171.0).

    instruction ─stdin─▶ codex exec - ── POST …/v1/responses, over HTTP ─▶ the proxy
                            │ sub-agents (tools of the namespace multi_agent_v1): same process, header
                            │   x-openai-subagent: collab_spawn and x-codex-parent-thread-id
                            │ compaction: the history plus a last user text "You are performing a CONTEXT CHECKPOINT
                            │   COMPACTION …", without tools; then the user's texts and "Another language model …"
                            ▼
    the end is the process's exit

Exit code 0: the last turn ended; 1: it gave up (a refused prompt, a cut reply, a 403 or 409, retries used up). It
compacts by the usage it is told, before a turn and between its steps, never because a prompt was refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from opengyre.config import HarnessConfig
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.install import require
from opengyre.executions.options import harness_options, merged

NAME = "codex"
SETTINGS = ".codex/config.toml"
KEY = "OPENGYRE_KEY"
FOREVER_MS = 24 * 3600 * 1000  # the execution's own deadline ends a wait, never the client's
COMPACT_SHARE = 0.75  # of the context: one step more - its outputs are cut at 10,000 tokens - must still fit


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``[harness.options]`` for ``kind = "codex"``."""

    path: str | None = None  # the program; None: where ``opengyre harness list`` finds it
    model: str = (
        "opengyre"  # the name it asks for; one it knows selects another prompt and tools, see docs/harnesses.md
    )
    sub_agents: bool = True  # False: without the tools of multi_agent_v1
    goals: bool = False  # True: with its three tools for goals and budgets
    settings: dict[str, Any] = {}  # as in its config.toml; wins over ours
    compact_tokens: int | None = None  # it compacts at this many; None: at three quarters of the context
    args: list[str] = []  # further arguments


class Codex:
    """Starts ``codex exec`` with the instruction on stdin and its settings in the execution's home.

    Raises:
        ConfigError: not installed, another version, or an option that is none.
    """

    name = NAME

    def __init__(self, config: HarnessConfig, limits: Limits) -> None:
        self._options, self._limits = harness_options(config, Options), limits
        self._program = require(NAME, self._options.path)
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command, and its config.toml."""
        argv = [str(self._program), "exec", "--json", "--skip-git-repo-check"]
        argv += ["--dangerously-bypass-approvals-and-sandbox"]  # the execution's sandbox is the sandbox
        argv += [*self._options.args, "-"]
        files = {SETTINGS: toml(merged(self.settings(base_url, model), self._options.settings))}
        return Launch(argv, {KEY: key} | self._env, instruction, [str(_installation(self._program))], files)

    def settings(self, base_url: str, model: str) -> dict[str, Any]:
        """Its config.toml: one provider, which waits for ever, and what it is told of the context."""
        options, context = self._options, self._limits.context
        return {
            "model": model,
            "model_provider": "opengyre",
            "model_context_window": context,
            "model_auto_compact_token_limit": options.compact_tokens or int(context * COMPACT_SHARE),
            "web_search": "disabled",  # it runs on the vendor's servers
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "history": {"persistence": "none"},
            "agents": {"enabled": options.sub_agents},
            "features": {
                "goals": options.goals,
                **dict.fromkeys(("apps", "plugins", "remote_plugin"), False),  # fetched from the vendor's servers
            },
            "model_providers": {
                "opengyre": {
                    "name": "OpenGyre",
                    "base_url": f"{base_url}/v1",
                    "env_key": KEY,
                    "wire_api": "responses",
                    "supports_websockets": False,
                    "request_max_retries": 10,
                    "stream_max_retries": 10,
                    "stream_idle_timeout_ms": FOREVER_MS,
                }
            },
        }


def toml(table: dict[str, Any]) -> str:
    """A table as TOML: every value inline, which is shorter than sections and means the same."""
    return "".join(f"{json.dumps(key)} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)  # JSON strings, numbers and booleans are TOML too


def _installation(program: Path) -> Path:
    """The folder its helper programs lie in, beside ``bin``; the program itself if it stands alone."""
    program = program.resolve()
    return program.parent.parent if program.parent.name == "bin" else program
