"""The guard: a run in which nothing gets a score ends with the first reason; single failures are data."""

import pytest

from opengyre.errors import EvaluatorError, HarnessError
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.run.guard import DROPPED_IN_ROW, FIRST, Guard


def result(n: int, outcome: Outcome) -> ExecutionResult:
    reward = 0.0 if outcome.scored else None
    return ExecutionResult(f"q{n:06d}-00-0", f"q{n:06d}", "t", outcome, reward, detail=f"stderr of {n}")


@pytest.mark.parametrize(
    ("outcome", "kind"), [(Outcome.EVALUATOR_FAILED, EvaluatorError), (Outcome.HARNESS_FAILED, HarnessError)]
)
def test_o10_a_broken_set_up_ends_the_run_with_its_first_reason(outcome: Outcome, kind: type) -> None:
    guard = Guard()
    said = [guard.finished(result(n, Outcome.FINISHED if n % 3 == 0 else outcome)) for n in range(FIRST)]
    assert said[:-1] == [None] * (FIRST - 1) and isinstance(said[-1], kind)
    assert "first 20 executions have no score" in str(said[-1]) and "stderr of 1" in str(said[-1])


def test_half_of_them_and_later_failures_are_data() -> None:
    guard = Guard()
    outcomes = [Outcome.TIMED_OUT, Outcome.INFRA_ABORT] * (FIRST // 2) + [Outcome.HARNESS_FAILED] * 100
    assert [guard.finished(result(n, o)) for n, o in enumerate(outcomes)] == [None] * len(outcomes)


def test_cancelled_executions_say_nothing() -> None:
    guard = Guard()
    assert all(guard.finished(result(n, Outcome.CANCELLED)) is None for n in range(3 * FIRST))


def test_query_after_query_without_a_score_ends_the_run() -> None:
    guard = Guard()
    for n in range(FIRST):
        guard.finished(result(n, Outcome.FINISHED))
    guard.finished(result(FIRST, Outcome.EVALUATOR_FAILED))
    assert all(guard.query(dropped=True) is None for _ in range(DROPPED_IN_ROW - 1))
    assert guard.query(dropped=False) is None
    said = [guard.query(dropped=True) for _ in range(DROPPED_IN_ROW)]
    assert isinstance(said[-1], EvaluatorError) and said[:-1] == [None] * (DROPPED_IN_ROW - 1)
