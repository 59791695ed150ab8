"""How an execution ended, and whether that is a number.

Who can cause the failure decides (SPEC §3.9): what the policy can provoke stays scored; what only the infrastructure
can do has no reward and leaves loss and baseline.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """Terminal state of an execution."""

    FINISHED = "finished"  # the harness ended by itself; scored
    TIMED_OUT = "timed_out"  # the deadline ended it; what the workspace holds is scored
    HARNESS_FAILED = "harness_failed"  # ended before its first model call: a harness error, not the policy's
    INFRA_ABORT = "infra_abort"  # sandbox or engine lost through no doing of the policy; replaced
    EVALUATOR_FAILED = "evaluator_failed"  # no reward after the evaluator's own retries
    CANCELLED = "cancelled"  # the run ended first

    @property
    def scored(self) -> bool:
        """True if a reward exists."""
        return self in (Outcome.FINISHED, Outcome.TIMED_OUT)


class ExecutionResult(msgspec.Struct, frozen=True):
    """What is known when an execution is over. ``reward`` is None exactly when the outcome is not scored.

    Times are seconds: ``queued_s`` waiting for admission, ``boot_s`` sandbox and harness start, ``active_s`` the
    harness's own time, ``held_s`` of it held by us (paused engine, switching cell), ``score_s`` the evaluator.
    ``detail`` is the last lines of the harness's error output or the evaluator's message.
    """

    execution_id: str
    query_id: str
    task_id: str
    outcome: Outcome
    reward: float | None
    checks: dict[str, float] = msgspec.field(default_factory=dict)
    queued_s: float = 0.0
    boot_s: float = 0.0
    active_s: float = 0.0
    held_s: float = 0.0
    score_s: float = 0.0
    calls: int = 0
    exit_code: int | None = None
    tampered: bool = False
    detail: str = ""

    def __post_init__(self) -> None:
        if self.outcome.scored != (self.reward is not None):
            raise ValueError(f"execution {self.execution_id}: outcome {self.outcome} with reward {self.reward}")
