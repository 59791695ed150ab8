"""Which harness a config means."""

from __future__ import annotations

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Harness
from opengyre.executions.harness.command import CommandHarness
from opengyre.executions.harness.quickstart import QuickstartHarness


def make_harness(config: HarnessConfig) -> Harness:
    """The adapter for ``harness.kind``. Raises ConfigError naming the kinds there are."""
    match config.kind:
        case "command":
            return CommandHarness(config)
        case "quickstart":
            return QuickstartHarness(config)
    raise ConfigError(f"{config.kind!r}", where="harness.kind", right="quickstart or command")
