"""Did the run learn? The answer in words, with the interval it rests on."""

from __future__ import annotations

from typing import Any

import msgspec

from opengyre.watch.intervals import difference, wilson
from opengyre.watch.text import percent


class Rate(msgspec.Struct, frozen=True):
    """A pass rate that was measured: ``passes`` of ``n`` executions on one weights version, 95 % in [low, high]."""

    version: int
    passes: int
    n: int
    rate: float
    low: float
    high: float


class Verdict(msgspec.Struct, frozen=True):
    """``tone`` is ``good``, ``bad``, ``flat`` or ``unknown``; ``change`` is (after - before, low, high) as shares."""

    tone: str
    headline: str
    detail: str
    before: Rate | None = None
    after: Rate | None = None
    change: tuple[float, float, float] | None = None


def rate_of(evaluation: dict[str, Any]) -> Rate | None:
    """The pass rate of an ``eval`` event with its Wilson interval; None if nothing was scored."""
    n, rate = int(evaluation.get("executions") or 0), evaluation.get("pass_rate")
    if n <= 0 or rate is None:
        return None
    passes = int(evaluation.get("passed", round(rate * n)))
    return Rate(int(evaluation.get("version") or 0), passes, n, passes / n, *wilson(passes, n))


def judge(evals: list[dict[str, Any]], *, learning_rate: float | None, steps: int) -> Verdict:
    """Compare the first held-out evaluation with the last; ``evals`` in the order of their versions."""
    rates = [rate for rate in map(rate_of, evals) if rate is not None]
    if not rates:
        return Verdict("unknown", "Held-out pass rate: not measured", "No evaluation finished in this run.")
    before, after = rates[0], rates[-1]
    if len(rates) == 1:
        text = f"Measured once, on weights version {before.version}; a second evaluation is needed to see a change."
        return Verdict("unknown", f"Held-out pass rate {percent(before.rate)}", text, before)
    low, high = difference((before.passes, before.n), (after.passes, after.n))
    change = (after.rate - before.rate, low, high)
    noise = low <= 0.0 <= high
    points, low_points, high_points = (100 * x for x in change)
    spread = f"The change of {points:+.1f} points has a 95 % interval of {low_points:+.1f} to {high_points:+.1f} points"
    figures = f"{percent(before.rate)} → {percent(after.rate)}".replace(" ", "\u00a0")  # kept on one line
    moved = f"Held-out pass rate {figures}"
    if after.version == before.version:
        head = f"{moved} on the same weights"
        return Verdict("flat", head, f"No step changed the weights in between. {spread}.", before, after, change)
    if learning_rate == 0:
        if noise:
            head = "Learning rate 0: no learning expected, none seen"
            return Verdict("flat", head, f"{spread}, which holds 0.", before, after, change)
        head = "Learning rate 0, yet the pass rate moved by more than noise"
        return Verdict("bad", head, f"{spread}. Look at the evaluation, not at the policy.", before, after, change)
    if noise:
        text = f"{spread}, which holds 0: more held-out executions, or more than {steps} steps, would tell."
        return Verdict("flat", f"{moved}: within noise", text, before, after, change)
    tone, word = ("good", "a gain") if change[0] > 0 else ("bad", "a loss")
    return Verdict(tone, f"{moved}: {word} beyond noise", f"{spread}, which excludes 0.", before, after, change)
