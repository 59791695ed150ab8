"""Which harness a config means."""

from __future__ import annotations

from opengyre.config import HarnessConfig, RunConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Harness, Limits
from opengyre.executions.harness.claude_code import ClaudeCode
from opengyre.executions.harness.codex import Codex
from opengyre.executions.harness.command import CommandHarness
from opengyre.executions.harness.mini_swe_agent import MiniSweAgent
from opengyre.executions.harness.opencode import OpenCode
from opengyre.executions.harness.quickstart import QuickstartHarness
from opengyre.executions.harness.qwen_code import QwenCode

KINDS = ("quickstart", "command", "claude_code", "opencode", "codex", "qwen_code", "mini_swe_agent", "paced")


def make_harness(config: HarnessConfig, limits: Limits | None = None) -> Harness:
    """The adapter for ``harness.kind``; ``limits`` are those of the policy it will work with.

    Raises ConfigError naming the kinds there are, or what is wrong with its options or its installation.
    """
    limits = limits or Limits(RunConfig().model.context)
    match config.kind:
        case "command":
            return CommandHarness(config)
        case "quickstart":
            return QuickstartHarness(config)
        case "claude_code":
            return ClaudeCode(config, limits)
        case "opencode":
            return OpenCode(config, limits)
        case "codex":
            return Codex(config, limits)
        case "qwen_code":
            return QwenCode(config, limits)
        case "mini_swe_agent":
            return MiniSweAgent(config, limits)
        case "paced":
            from opengyre.paced.workload import PacedHarness  # the simulator's modules are of no use to other runs

            return PacedHarness(config)
    raise ConfigError(f"{config.kind!r}", where="harness.kind", right=", ".join(KINDS))
