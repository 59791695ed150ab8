"""Which sandbox a config means."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from opengyre.errors import ConfigError
from opengyre.executions.sandbox import bubblewrap
from opengyre.executions.sandbox.base import Sandbox
from opengyre.executions.sandbox.bubblewrap import BubblewrapSandbox
from opengyre.executions.sandbox.local import LocalSandbox


class MakeSandbox(Protocol):
    """Anything that makes sandboxes: ``make_sandbox``, or one that fails on purpose in a test."""

    def __call__(self, kind: str, execution_id: str, root: Path, *, keep: bool = False) -> Sandbox:
        """A fresh, empty sandbox."""
        ...


def resolve_kind(kind: str) -> str:
    """``auto`` as what works here; a kind that does not work is a ConfigError saying why."""
    if kind == "local":
        return kind
    why_not = bubblewrap.probe()
    if kind == "bubblewrap" and why_not:
        raise ConfigError(why_not, where="sandbox.kind", right='"local", or a working bubblewrap')
    return "local" if why_not else "bubblewrap"


def make_sandbox(kind: str, execution_id: str, root: Path, *, keep: bool = False) -> Sandbox:
    """A fresh sandbox at ``root/execution_id``; ``keep`` leaves the workspace on close.

    Raises:
        ConfigError: bubblewrap is asked for and does not work here.
        SandboxError: the folders cannot be made, or the id was used before.
    """
    make = LocalSandbox if resolve_kind(kind) == "local" else BubblewrapSandbox
    return make(execution_id, root, keep=keep)
