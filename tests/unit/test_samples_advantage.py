"""Group-relative advantage, field case N09."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.samples.advantage import Degenerate, group_advantage

KINDS = ("mean", "std", "leave_one_out")


@pytest.mark.parametrize("kind", KINDS)
def test_n09_every_odd_group_has_a_defined_result(kind) -> None:
    one = group_advantage([5.0], kind, min_valid=1)
    assert (one.advantages, one.degenerate) == ((0.0,), Degenerate.SINGLE)
    assert group_advantage([5.0], kind).degenerate is Degenerate.TOO_FEW

    loser = group_advantage([0.2, 0.9, 0.9, 0.9], kind)
    assert (loser.valid, loser.degenerate) == (4, None)
    assert loser.advantages[0] < 0 < min(loser.advantages[1:])

    holed = group_advantage([1, None, 0], kind)
    assert (holed.valid, holed.excluded, holed.mean, holed.std) == (2, 1, 0.5, 0.5)
    assert holed.advantages[1] is None
    assert holed.advantages[0] == -holed.advantages[2] > 0

    for same in ([0.1 + 0.2, 0.3], [1, 1, 1, 1]):
        flat = group_advantage(same, kind)
        assert flat.degenerate is Degenerate.NO_VARIANCE
        assert set(flat.advantages) == {0.0}


@pytest.mark.parametrize("rewards", [[], [None], [math.nan, None], [math.inf, None]])
def test_a_group_without_rewards_is_degenerate_and_has_no_advantages(rewards) -> None:
    group = group_advantage(rewards)
    assert group.degenerate is Degenerate.NO_REWARD
    assert set(group.advantages) <= {None}


def test_the_three_kinds_by_hand() -> None:
    rewards = [0.0, 0.0, 1.0]
    assert group_advantage(rewards, "mean").advantages == pytest.approx((-1 / 3, -1 / 3, 2 / 3))
    assert group_advantage(rewards, "leave_one_out").advantages == pytest.approx((-0.5, -0.5, 1.0))
    std = math.sqrt(2) / 3
    assert group_advantage(rewards, "std").advantages == pytest.approx(
        (-1 / 3 / std, -1 / 3 / std, 2 / 3 / std), rel=1e-4
    )


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_infinity=True, width=32, min_value=None)), max_size=20),
    st.sampled_from(KINDS),
    st.integers(1, 4),
)
def test_no_advantage_is_ever_nan_and_failures_never_enter(rewards, kind, min_valid) -> None:
    group = group_advantage(rewards, kind, min_valid=min_valid)
    finite = [r is not None and math.isfinite(r) for r in rewards]
    assert [a is not None for a in group.advantages] == finite
    assert all(math.isfinite(a) for a in group.advantages if a is not None)
    assert (group.valid, group.valid + group.excluded) == (sum(finite), len(rewards))
    kept = group_advantage([r for r, f in zip(rewards, finite, strict=True) if f], kind, min_valid=min_valid)
    assert [a for a in group.advantages if a is not None] == list(kept.advantages)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.sampled_from(KINDS))
def test_advantages_sum_to_nothing(rewards, kind) -> None:
    assert math.fsum(group_advantage(rewards, kind).advantages) == pytest.approx(0, abs=1e-6)
