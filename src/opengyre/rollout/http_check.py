"""Are a server's log-probabilities those its tokens were drawn with? Asked once, before anything is recorded.

The behaviour log-probability of a token is that of the distribution it was drawn from: after temperature (SPEC §4.2).
Servers can be started so that they report the one before it. At temperature t the likeliest tokens lie 1/t as far
apart, so the same prompt at two temperatures tells; what is no log-probability at all shows by its sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from opengyre.rollout.http import HttpEngine

COLD, HOT = 0.5, 2.0  # vLLM takes no temperature above 2
LEAST_SPREAD = 1e-2  # nats, at COLD; closer together than this, rounding decides
SUM_SLACK = 1e-2  # a server rounds


class Logprobs(StrEnum):
    """What a server reports. Only what is certain is acted upon."""

    AFTER_TEMPERATURE = "after temperature"
    BEFORE_TEMPERATURE = "before temperature"
    NOT_NORMALISED = "not normalised"
    UNKNOWN = "unknown"  # the model finds all tokens equally likely


async def check_logprobs(engine: HttpEngine, prompts: Sequence[list[int]]) -> Logprobs:
    """Ask for the first token of each prompt until one tells. Raises EngineError when the server does not answer."""
    for prompt in prompts:
        cold = await engine.top_logprobs(prompt, temperature=COLD)
        verdict = read_logprobs(cold, await engine.top_logprobs(prompt, temperature=HOT))
        if verdict is not Logprobs.UNKNOWN:
            return verdict
    return Logprobs.UNKNOWN


def read_logprobs(cold: Sequence[float], hot: Sequence[float]) -> Logprobs:
    """What the likeliest tokens' values at temperatures ``COLD`` and ``HOT`` (both falling) say."""
    for values in (cold, hot):
        if max(values) > SUM_SLACK or math.fsum(map(math.exp, values)) > 1.0 + SUM_SLACK:
            return Logprobs.NOT_NORMALISED
    n = min(len(cold), len(hot), 5)  # the far tail is where rounding and ties live
    far, near = cold[0] - cold[n - 1], hot[0] - hot[n - 1]
    if far < LEAST_SPREAD:
        return Logprobs.UNKNOWN
    # far / near is HOT / COLD = 4 after temperature and 1 before it
    return Logprobs.AFTER_TEMPERATURE if near < far / 2 else Logprobs.BEFORE_TEMPERATURE
