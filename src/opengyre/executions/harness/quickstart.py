"""The built-in harness: one file, standard library only, run like any other harness."""

from __future__ import annotations

import sys
from pathlib import Path

import opengyre.quickstart
from opengyre.config import HarnessConfig
from opengyre.executions.harness.base import Launch
from opengyre.executions.harness.command import client_variables

HARNESS_FILE = Path(opengyre.quickstart.__path__[0]) / "harness.py"


class QuickstartHarness:
    """Runs ``quickstart/harness.py`` on an interpreter without site-packages; the instruction goes to stdin."""

    name = "quickstart"

    def __init__(self, config: HarnessConfig) -> None:
        self._env = config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The harness's command; ``-I -S`` keeps the workspace and our packages out of its imports."""
        argv = [sys.executable, "-I", "-S", str(HARNESS_FILE)]
        return Launch(argv, client_variables(base_url, key, model) | self._env, instruction, [str(HARNESS_FILE)])
