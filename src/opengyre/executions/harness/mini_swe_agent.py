"""mini-swe-agent, unmodified and headless (measured with 2.4.6 over litellm 1.110.2).

    config file ──▶ mini ── POST …/v1/chat/completions, not streamed ─▶ the proxy
                      │ one agent, one tool (bash); no sub-agents, no compaction, no titles
                      ▼
    the end is the process's exit, after the policy printed COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT

Exit code 0: submitted, or three replies in a row without a tool call; 1: it gave up (a prompt that does not fit any
more; a 403 or 409, after as many attempts as it is given). A reply without a tool call is dropped from its history, and
an error of its own takes its place: such a turn stays a leaf of the tree.
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

NAME = "mini_swe_agent"
SETTINGS = ".config/mini-swe-agent/opengyre.yaml"
FOREVER_S = 24 * 3600  # the execution's own deadline ends a wait, never the client's

QUIET = {
    "MSWEA_CONFIGURED": "true",  # else it asks for a model and a key
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what our policy costs
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from GitHub
    "LITELLM_TELEMETRY": "False",
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``[harness.options]`` for ``kind = "mini_swe_agent"``."""

    path: str | None = None  # the program; None: where ``opengyre harness list`` finds it
    model: str = "opengyre"  # the name it asks for
    config: str = "mini.yaml"  # one of its own configs, or a file
    settings: dict[str, Any] = {}  # as in its config files, e.g. {agent = {step_limit = 50}}; wins over ``config``
    attempts: int = 5  # at one call, over 20 s; every error but a refused prompt, a 401 and a 404 is tried again
    reply_tokens: int | None = None  # max_tokens of each call; None: sampling.max_tokens, or it asks for no limit
    args: list[str] = []  # further arguments


class MiniSweAgent:
    """Starts ``mini`` with the instruction in a config file in the execution's home.

    Raises:
        ConfigError: not installed, another version, or an option that is none.
    """

    name = NAME

    def __init__(self, config: HarnessConfig, limits: Limits) -> None:
        self._options, self._limits = harness_options(config, Options), limits
        self._program = require(NAME, self._options.path)
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command, and its config file: what the instruction holds must not be read as an option."""
        options = self._options
        argv = [str(self._program), "--yolo", "--exit-immediately", "--cost-limit", "0"]
        argv += ["-c", options.config, "-c", str(home / SETTINGS)]
        env = {
            "OPENAI_API_KEY": key,
            "MSWEA_GLOBAL_CONFIG_DIR": str((home / SETTINGS).parent),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(options.attempts),
            **QUIET,
        }
        reply = options.reply_tokens or self._limits.reply
        about = {"api_base": f"{base_url}/v1", "timeout": FOREVER_S, **({"max_tokens": reply} if reply else {})}
        settings = {"run": {"task": instruction}, "model": {"model_name": f"openai/{model}", "model_kwargs": about}}
        files = {SETTINGS: json.dumps(merged(settings, options.settings), indent=1)}  # JSON is YAML
        return Launch([*argv, *options.args], env | self._env, "", [str(self._program.parent.parent)], files)
