"""Notices that a run cannot work: nothing gets a score, and it would go on for ever without learning anything.

Single failures are data. But when most executions of the beginning have no reward, or query after query ends without
one, something is broken that no retry mends: the harness, the evaluator, the sandbox. The run then ends with the first
reason instead of the last symptom.
"""

from __future__ import annotations

from opengyre.errors import EvaluatorError, HarnessError, OpenGyreError, SandboxError
from opengyre.executions.outcome import ExecutionResult, Outcome

FIRST = 20  # executions looked at; a broken set-up shows in each of them
DROPPED_IN_ROW = 8  # queries; with groups of several executions no run of bad luck is that long
_KIND: dict[Outcome, type[OpenGyreError]] = {
    Outcome.HARNESS_FAILED: HarnessError,
    Outcome.EVALUATOR_FAILED: EvaluatorError,
    Outcome.INFRA_ABORT: SandboxError,
}


class Guard:
    """Pure: told of results and dropped queries, it answers with the error that should end the run, or None."""

    def __init__(self) -> None:
        self._seen = 0
        self._failures: list[ExecutionResult] = []
        self._dropped = 0

    def finished(self, result: ExecutionResult) -> OpenGyreError | None:
        """An execution is over. More than half of the first ones without a reward end the run."""
        if result.outcome not in (*_KIND, Outcome.FINISHED, Outcome.TIMED_OUT):
            return None
        if result.reward is None and not (self._failures and self._seen >= FIRST):
            self._failures.append(result)
        self._seen += 1
        if self._seen != FIRST or 2 * len(self._failures) <= FIRST:
            return None
        return self._error(f"{len(self._failures)} of the first {FIRST} executions have no score")

    def query(self, *, dropped: bool) -> OpenGyreError | None:
        """A query is complete. Many in a row without a single score end the run."""
        self._dropped = self._dropped + 1 if dropped else 0
        if self._dropped < DROPPED_IN_ROW:
            return None
        return self._error(f"{self._dropped} queries in a row ended without a score")

    def _error(self, what: str) -> OpenGyreError:
        if not self._failures:
            return SandboxError(what)
        first = self._failures[0]
        detail = first.detail.strip() or first.outcome.value
        return _KIND[first.outcome](f"{what}; the first: {detail}", where=f"execution {first.execution_id}")
