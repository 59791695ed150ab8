"""One error vocabulary, and one helper that says which boundary an exception crossed.

A bad execution is data, not a crash: the runner turns these into outcomes, the command line turns them into one line.
Every error carries what went wrong, where, and what would have been right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OpenGyreError(Exception):
    """Base of all errors a user can meet.

    Args:
        what: what went wrong, naming the value.
        where: the config key, file, task or cell it concerns.
        right: what would have been accepted, or what to do.
    """

    def __init__(self, what: str, *, where: str | None = None, right: str | None = None) -> None:
        self.what, self.where, self.right = what, where, right
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} ({self.right})" if self.right else head


class ConfigError(OpenGyreError):
    """A key, value or combination in a config that cannot work."""


class TaskError(OpenGyreError):
    """A task that is incomplete: no instruction, no evaluator, broken data."""


class HarnessError(OpenGyreError):
    """The harness could not be started, or ended before its first model call."""


class SandboxError(OpenGyreError):
    """The place an execution runs in could not be made, or was lost; never the policy's doing."""


class EvaluatorError(OpenGyreError):
    """The evaluator failed, overran its own budget or returned a value outside its range. Never a reward of 0."""


class EngineError(OpenGyreError):
    """A rollout engine refused, broke or vanished."""


class TransferError(OpenGyreError):
    """Bytes that were promised did not arrive, or their digest differs."""


class RecordError(OpenGyreError):
    """The record of calls is unreadable or contradicts itself."""


class TrainingError(OpenGyreError):
    """A trainer broke, or a number that must be finite is not."""


class CellError(OpenGyreError):
    """A cell did not start, died, or missed a deadline of its role switch."""


class CellSilent(CellError):
    """A cell did not answer in time; it may be alive."""


@contextmanager
def boundary(kind: type[OpenGyreError], where: str) -> Iterator[None]:
    """Re-type any exception that escapes as ``kind`` at ``where``; errors already typed pass through unchanged."""
    try:
        yield
    except OpenGyreError:
        raise
    except Exception as cause:
        raise kind(f"{type(cause).__name__}: {cause}", where=where) from cause
