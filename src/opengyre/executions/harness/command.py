"""Any harness that is a command: its argv with placeholders filled in, and the variables clients read."""

from __future__ import annotations

import re
from pathlib import Path

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Launch

PLACEHOLDERS = ("instruction", "workspace", "home", "base_url", "key", "model")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


def client_variables(base_url: str, key: str, model: str) -> dict[str, str]:
    """What Anthropic and OpenAI clients read from the environment; OpenAI's base URL ends in ``/v1``."""
    return {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
    }


class CommandHarness:
    """``harness.command`` as given.

    Placeholders are ``{instruction} {workspace} {home} {base_url} {key} {model}`` in ``command`` and ``env``; other
    braces stay as they are, and what a placeholder brings in is not looked at again. If no argument takes the
    instruction, it is fed to stdin. Options: ``tools`` (host paths the command reads besides the system's; ``~`` is
    expanded) and ``model`` (the name the harness asks for; some choose features by it).
    """

    name = "command"

    def __init__(self, config: HarnessConfig) -> None:
        unknown = set(config.options) - {"tools", "model"}
        if unknown:
            raise ConfigError(f"unknown key {min(unknown)!r}", where="harness.options", right="tools, model")
        tools = config.options.get("tools", [])
        if not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools):
            raise ConfigError(f"{tools!r}", where="harness.options.tools", right="a list of paths")
        self._tools = [str(Path(tool).expanduser()) for tool in tools]
        self._command, self._env = config.command, config.env

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command with its placeholders filled in."""
        values = dict(
            zip(PLACEHOLDERS, (instruction, str(workspace), str(home), base_url, key, model), strict=True),
        )

        def fill(text: str) -> str:
            return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

        stdin = "" if any("{instruction}" in word for word in self._command) else instruction
        env = client_variables(base_url, key, model) | {name: fill(value) for name, value in self._env.items()}
        return Launch([fill(word) for word in self._command], env, stdin, self._tools)
