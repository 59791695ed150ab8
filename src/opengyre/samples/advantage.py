"""How much better an execution did than its group.

An execution without a reward (evaluator or infrastructure failure) is not a number: it leaves the baseline before any
statistic is taken (SPEC §3.9). Every group has a defined result; one that cannot rank its executions is *degenerate*:
all advantages are 0, it gives no gradient, and it is counted, never resampled for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

Kind = Literal["mean", "std", "leave_one_out"]

SPREAD_EPS = 1e-9  # 0.1 + 0.2 and 0.3 are the same reward; a range test also has no NaN for a group of one
STD_EPS = 1e-6  # keeps a barely spread group finite; below any reward step a task uses


class Degenerate(StrEnum):
    """Why a group gives no gradient."""

    NO_REWARD = "no_reward"  # every execution failed outside the policy's reach
    TOO_FEW = "too_few"  # fewer scored executions than min_valid
    SINGLE = "single"  # one scored execution has nothing to be compared with
    NO_VARIANCE = "no_variance"  # all scored executions did equally well


class GroupAdvantage(msgspec.Struct, frozen=True):
    """Advantages of one group, aligned with its rewards: None exactly where the reward was no finite number.

    ``mean`` and ``std`` (population) are over the valid rewards, NaN when there is none.
    """

    advantages: tuple[float | None, ...]
    valid: int
    excluded: int
    mean: float
    std: float
    degenerate: Degenerate | None = None


def group_advantage(rewards: Sequence[float | None], kind: Kind = "std", *, min_valid: int = 2) -> GroupAdvantage:
    """Rank the executions of one group against each other.

    With valid rewards r_1..r_n: ``mean``: r_i - mean(r); ``std``: the same over std(r) + 1e-6 (GRPO, arXiv 2402.03300,
    population form: the group is all there is); ``leave_one_out``: r_i - mean of the others (RLOO, arXiv 2402.14740).
    """
    valid = [float(r) for r in rewards if r is not None and math.isfinite(r)]
    n = len(valid)
    mean = math.fsum(valid) / n if n else math.nan
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in valid) / n) if n else math.nan
    why = _degenerate(valid, min_valid)

    def one(reward: float | None) -> float | None:
        if reward is None or not math.isfinite(reward):
            return None
        if why is not None:
            return 0.0
        centred = float(reward) - mean
        if kind == "std":
            return centred / (std + STD_EPS)
        if kind == "leave_one_out":
            return centred * n / (n - 1)  # = r - (n * mean - r) / (n - 1)
        return centred

    return GroupAdvantage(tuple(map(one, rewards)), n, len(rewards) - n, mean, std, why)


def _degenerate(valid: Sequence[float], min_valid: int) -> Degenerate | None:
    if not valid:
        return Degenerate.NO_REWARD
    if len(valid) < min_valid:
        return Degenerate.TOO_FEW
    if len(valid) == 1:
        return Degenerate.SINGLE
    return Degenerate.NO_VARIANCE if max(valid) - min(valid) <= SPREAD_EPS else None
