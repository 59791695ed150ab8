"""How a harness is started: a command line and an environment. Harnesses are never modified and never told anything
beyond a base URL, a key and the instruction."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec


class Launch(msgspec.Struct, frozen=True):
    """What the sandbox starts. ``env`` is added to the sandbox's minimal environment; ``stdin`` is fed and closed;
    ``tools`` are host paths the command reads besides the system's (its own code); a sandbox shows them read-only.
    ``files`` are written before the command starts: text by path below the home."""

    argv: list[str]
    env: dict[str, str]
    stdin: str = ""
    tools: list[str] = []
    files: dict[str, str] = {}


class Limits(msgspec.Struct, frozen=True):
    """What the policy can take: ``context`` tokens of prompt and reply together, and at most ``reply`` of them sampled
    in one call (None: what the harness asks). Harnesses that compact by themselves are told."""

    context: int
    reply: int | None = None


class Harness(Protocol):
    """An adapter for one kind of harness."""

    name: str

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        """The command that runs the harness on ``instruction``.

        ``base_url`` already carries the execution's path prefix (``http://127.0.0.1:P/x/<execution>``); ``workspace``
        and ``home`` are the paths as the harness will see them.
        """
        ...
