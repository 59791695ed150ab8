"""What an execution counts as in its group: failures are no numbers, but for the one case that a config may allow."""

from pathlib import Path
from typing import cast

import pytest

from opengyre.config import build
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.record.store import Store
from opengyre.run.harvest import Harvest


@pytest.mark.parametrize("placeholder", [False, True])
@pytest.mark.parametrize(
    ("outcome", "calls", "reward", "counts_as"),
    [
        (Outcome.FINISHED, 3, 0.5, 0.5),
        (Outcome.INFRA_ABORT, 0, None, 0.0),
        (Outcome.INFRA_ABORT, 3, None, None),
        (Outcome.EVALUATOR_FAILED, 3, None, None),
        (Outcome.HARNESS_FAILED, 0, None, None),
    ],
)
def test_a_placeholder_is_for_what_was_lost_before_the_agent_could_act(
    tmp_path: Path, placeholder: bool, outcome: Outcome, calls: int, reward: float | None, counts_as: float | None
) -> None:
    config = build({"samples": {"infra_placeholder": placeholder}})
    harvest = Harvest(config, cast(Store, None), lambda _: None, tmp_path, str)
    result = ExecutionResult("q000000-00-0", "q000000", "t", outcome, reward, calls=calls)
    assert harvest.reward(result) == (counts_as if placeholder else reward)
