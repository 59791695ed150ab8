"""Qwen Code, unmodified and headless (measured with 0.15.10).

    instruction ─stdin─▶ node qwen ── POST …/v1/chat/completions ─▶ the proxy
                            │ sub-agents (tool ``agent``): same process, told by their system prompt alone
                            │ compaction: a call of its own without tools and without streaming, "You are the component
                            │   that summarizes internal chat history …", over all but the newest part of the history
                            ▼
    the end is the process's exit

Exit code 0: the last turn ended; 1: it gave up (a refused prompt that cannot be compacted, a 403 or 409). It compacts
when the proxy answers "prompt is too long", once per call, and before that at 70 % of the context it was told.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.install import require
from opengyre.executions.options import harness_options, merged

NAME = "qwen_code"
REPLY_TOKENS = 32_000  # less where the context is small
SETTINGS = ".qwen/settings.json"
FOREVER_MS = 24 * 3600 * 1000  # the execution's own deadline ends a wait, never the client's

QUIET = {
    "QWEN_TELEMETRY_ENABLED": "false",
    "QWEN_DISABLE_AUTO_TITLE": "1",
    "QWEN_CODE_DISABLE_PRECONNECT": "1",
    "QWEN_CODE_NO_RELAUNCH": "1",  # else it starts itself a second time, with a larger heap
    "NO_COLOR": "1",
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``[harness.options]`` for ``kind = "qwen_code"``."""

    path: str | None = None  # the program; None: where ``opengyre harness list`` finds it
    model: str = "opengyre"  # the name it asks for; a name it knows brings its own limits
    exclude_tools: list[str] = []  # e.g. ["web_fetch"]
    settings: dict[str, Any] = {}  # as in its settings.json; wins over ours
    reply_tokens: int | None = None  # max_tokens of each call; None: sampling.max_tokens, or a quarter of the context
    compact_share: float | None = None  # of the context, at which it compacts; None: its own, 0.7; 0: never
    args: list[str] = []  # further arguments


class QwenCode:
    """Starts Qwen Code with the instruction on stdin and its settings in the execution's home.

    Raises:
        ConfigError: it or Node.js is not installed, another version, or an option that is none.
    """

    name = NAME

    def __init__(self, config: HarnessConfig, limits: Limits) -> None:
        self._options, self._limits = harness_options(config, Options), limits
        if (node := shutil.which("node")) is None:
            raise ConfigError("node is not on PATH", where="harness.kind", right="install Node.js 20 or newer")
        self._node, self._program = node, require(NAME, self._options.path).resolve()
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command, and its settings.json."""
        options, limits = self._options, self._limits
        argv = [self._node, str(self._program), "--auth-type", "openai", "--yolo", "--output-format", "stream-json"]
        argv += ["--exclude-tools", ",".join(options.exclude_tools)] if options.exclude_tools else []
        reply = options.reply_tokens or limits.reply or min(REPLY_TOKENS, limits.context // 4)
        env = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": model,
            # Without it a reply that was cut is asked for again with 64,000 tokens.
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(reply),
            "QWEN_CODE_API_TIMEOUT_MS": str(FOREVER_MS),
            **QUIET,
        }
        files = {SETTINGS: json.dumps(merged(self.settings(), options.settings), indent=1)}
        return Launch([*argv, *options.args], env | self._env, instruction, [str(self._program.parent)], files)

    def settings(self) -> dict[str, Any]:
        """Its settings.json: quiet, patient, and what it is told of the context."""
        share = self._options.compact_share
        return {
            "$version": 3,
            "general": {"enableAutoUpdate": False, "gitCoAuthor": {"commit": False, "pr": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # What it would keep for a next session, by agents of its own that run after the last turn.
            "memory": dict.fromkeys(("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill"), False),
            "security": {"auth": {"selectedType": "openai"}},
            "model": {
                "generationConfig": {
                    "timeout": FOREVER_MS,
                    "maxRetries": 10,
                    "contextWindowSize": self._limits.context,
                },
                **({} if share is None else {"chatCompression": {"contextPercentageThreshold": share}}),
            },
        }
