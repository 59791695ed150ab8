"""Losses against plain Python and hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.training.loss import LossConfig, k3, policy_loss

F64 = torch.float64


def reference_loss(new, behaviour, rows, advantages, weights, config, prox=None, reference=None) -> float:
    """The formulas of the module, token by token, in plain Python."""
    old = behaviour if prox is None else prox
    low, high = 1 - config.clip_low, 1 + config.clip_high
    total = 0.0
    for k, (advantage, weight) in enumerate(zip(advantages, weights, strict=True)):
        tokens = [m for m, row in enumerate(rows) if row == k]
        if not tokens:
            continue
        s = math.exp(sum(new[m] - old[m] for m in tokens) / len(tokens))
        for m in tokens:
            ratio = s if config.kind == "gspo" else math.exp(new[m] - old[m])
            held = min(max(ratio, low), high)
            value = held * advantage * new[m] if config.kind == "cispo" else min(ratio * advantage, held * advantage)
            if prox is not None and config.tis_cap is not None:
                value *= min(math.exp(prox[m] - behaviour[m]), config.tis_cap)
            if config.kl_weight:
                d = reference[m] - new[m]
                value -= config.kl_weight * (math.exp(d) - d - 1)
            total -= weight * value
    return total


def run(new, behaviour, rows, advantages, weights, config, prox=None, reference=None):
    tensor = torch.tensor(new, dtype=F64, requires_grad=True)
    loss = policy_loss(
        tensor,
        torch.tensor(behaviour, dtype=F64),
        torch.tensor(rows),
        torch.tensor(advantages, dtype=F64),
        torch.tensor(weights, dtype=F64),
        config,
        prox=None if prox is None else torch.tensor(prox, dtype=F64),
        reference=None if reference is None else torch.tensor(reference, dtype=F64),
    )
    loss.total.backward()
    return loss, tensor.grad.tolist()


logprob = st.floats(-6, -1e-3)


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    rows = [k for k, n in enumerate(lengths) for _ in range(n)]
    vector = lambda: draw(st.lists(logprob, min_size=len(rows), max_size=len(rows)))  # noqa: E731
    per_row = lambda e: draw(st.lists(e, min_size=len(lengths), max_size=len(lengths)))  # noqa: E731
    return vector(), vector(), rows, per_row(st.floats(-3, 3)), per_row(st.floats(0.01, 1)), vector(), vector()


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["gspo", "grpo", "cispo"]), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_equals_plain_python(problem, kind, decoupled, kl_weight):
    new, behaviour, rows, advantages, weights, prox, reference = problem
    config = LossConfig(kind, 0.2, 0.3, tis_cap=2.0 if decoupled else None, kl_weight=kl_weight)
    prox = prox if decoupled else None
    loss, grad = run(new, behaviour, rows, advantages, weights, config, prox, reference)
    expected = reference_loss(new, behaviour, rows, advantages, weights, config, prox, reference)
    assert loss.total.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert all(map(math.isfinite, grad))


@pytest.mark.parametrize("kind", ["gspo", "grpo"])
def test_gradient_is_the_derivative(kind):
    """Away from the clip, against a central difference of the plain-Python loss."""
    rows, advantages, weights = [0, 0, 0, 1, 1], [0.7, -1.3], [0.2, 0.2]
    new, old = [-1.0, -2.0, -0.5, -1.5, -3.0], [-1.1, -1.95, -0.52, -1.45, -3.02]
    config = LossConfig(kind, 0.9, 0.9, kl_weight=0.05)
    reference = [-1.2, -2.1, -0.4, -1.0, -2.0]
    _, grad = run(new, old, rows, advantages, weights, config, None, reference)
    step = 1e-6
    for m in range(len(new)):
        ends = []
        for sign in (1, -1):
            moved = list(new)
            moved[m] += sign * step
            ends.append(reference_loss(moved, old, rows, advantages, weights, config, None, reference))
        assert grad[m] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


def test_gspo_ratio_over_trained_tokens_only():
    """N07: log-ratios 0.2, -0.1, (masked 9.0), 0.2 -> s = e^0.1. The masked token is not among the given ones."""
    behaviour = [-1.0, -1.0, -1.0]
    loss, grad = run([-0.8, -1.1, -0.8], behaviour, [0, 0, 0], [1.0], [1 / 3], LossConfig("gspo", 0.5, 0.5))
    assert loss.ratios.tolist() == pytest.approx([1.10517], abs=1e-5)
    assert loss.total.item() == pytest.approx(-1.10517, abs=1e-5)
    assert grad == pytest.approx([-1.10517 / 3] * 3, abs=1e-5)  # every trained token pulls alike


def test_length_does_not_matter_at_ratio_one():
    """N07: two executions of 2 and 8 tokens with equal advantage contribute equally."""
    rows = [0] * 2 + [1] * 8
    logprobs = [-1.0] * 10
    for kind in ("gspo", "grpo"):
        _, grad = run(logprobs, logprobs, rows, [1.0, 1.0], [1 / 2, 1 / 8], LossConfig(kind))
        assert sum(grad[:2]) == pytest.approx(-1.0) and sum(grad[2:]) == pytest.approx(-1.0)


def test_one_execution_one_voice():
    """N03: per-token losses A [3], B [1, 1, 1]: sum/E = 2 however A and B are cut into trajectories."""
    cuts = [
        ([0, 1, 1, 1], [-3.0, -1.0], [1.0, 1 / 3]),  # one row each
        ([0, 1, 2, 3], [-3.0, -1.0, -1.0, -1.0], [1.0, 1 / 3, 1 / 3, 1 / 3]),  # B in three
        ([0, 1, 2, 2, 2], [-3.0, -3.0, -1.0], [0.5, 0.5, 1 / 3]),  # A in two rows of loss 3
    ]
    for rows, advantages, weights in cuts:
        logprobs = [-1.0] * len(rows)
        loss, _ = run(logprobs, logprobs, rows, advantages, weights, LossConfig())
        assert loss.total.item() / 2 == pytest.approx(2.0)
    halves = [
        run([-1.0] * n, [-1.0] * n, [0] * n, [a], [w], LossConfig())[0] for n, a, w in [(1, -3.0, 1), (3, -1.0, 1 / 3)]
    ]
    assert sum(h.total.item() for h in halves) / 2 == pytest.approx(2.0)  # two ranks


def test_every_row_of_an_execution_is_trained():
    """N04: three rows, one scalar advantage: each has a gradient at its own tokens."""
    rows = [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    logprobs = [-1.0] * 10
    _, grad = run(logprobs, logprobs, rows, [0.7] * 3, [0.1] * 3, LossConfig())
    assert grad == pytest.approx([-0.07] * 10)


def test_clip_takes_the_gradient_on_the_outside_only():
    config = LossConfig("gspo", 3e-4, 4e-4)
    for shift, advantage, clipped in [
        (1e-3, 1.0, 1),
        (1e-3, -1.0, 0),
        (-1e-3, -1.0, 1),
        (-1e-3, 1.0, 0),
        (1e-4, 1.0, 0),
    ]:
        loss, grad = run([-1.0 + shift], [-1.0], [0], [advantage], [1.0], config)
        assert loss.clipped == clipped
        assert (grad[0] == 0.0) == bool(clipped)


def test_decoupled_by_hand():
    """prox = new: s = 1, the clip is silent, and the weight is min(prox/behaviour, cap)."""
    new, behaviour = [-1.0, -1.0], [-1.0 - math.log(1.5), -4.0]
    loss, grad = run(new, behaviour, [0, 0], [2.0], [0.5], LossConfig(tis_cap=2.0), prox=new)
    assert loss.total.item() == pytest.approx(-0.5 * 2.0 * (1.5 + 2.0))
    assert grad == pytest.approx([-1.5, -2.0])
    assert loss.ratios.tolist() == [1.0]


def test_cispo_by_hand():
    loss, grad = run([-1.0, -2.0], [-2.0, -2.0], [0, 0], [1.0], [0.5], LossConfig("cispo", 0.2, 0.3))
    assert grad == pytest.approx([-0.5 * 1.3, -0.5])
    assert loss.total.item() == pytest.approx(-0.5 * (1.3 * -1.0 + 1.0 * -2.0))
    assert loss.clipped == 1


@pytest.mark.parametrize("kind", ["gspo", "grpo", "cispo"])
def test_gradients_stay_finite_and_alive_at_extreme_gaps(kind):
    new = torch.tensor([-1e-4, -80.0], dtype=torch.float32, requires_grad=True)
    old = torch.tensor([-120.0, -1e-4], dtype=torch.float32)
    config = LossConfig(kind, 0.2, 0.2, kl_weight=0.01)
    for rows in ([0, 1], [0, 0]):
        count = max(rows) + 1
        loss = policy_loss(
            new, old, torch.tensor(rows), -torch.ones(count), torch.ones(count), config, reference=old.flip(0)
        )
        (grad,) = torch.autograd.grad(loss.total, new)
        assert bool(torch.isfinite(grad).all()) and math.isfinite(loss.total.item())


def test_k3_pulls_towards_the_reference_at_any_distance():
    new = torch.tensor([-100.0, -2.0, -1.0, -0.5], dtype=F64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=F64)
    values = k3(new, reference)
    values.sum().backward()
    assert bool((values >= 0).all()) and values[2].item() == 0.0
    assert [math.copysign(1, g) if g else 0 for g in new.grad.tolist()] == [-1, -1, 0, 1]


def test_nothing_to_train():
    """N10: no token, no trajectory: zero, not an exception."""
    empty = torch.empty(0, dtype=F64, requires_grad=True)
    loss = policy_loss(
        empty, empty.detach(), torch.empty(0, dtype=torch.long), torch.ones(2), torch.ones(2), LossConfig()
    )
    assert loss.total.item() == 0.0 and loss.clipped == 0 and loss.ratios.tolist() == [1.0, 1.0]


def test_no_float32_surprise_in_the_step_size_of_the_paper():
    """eps 3e-4 is 2,500 float32 roundings around 1: the clip must act on the ratio, not on its rounding."""
    new = torch.full((1000,), -1.2345678, requires_grad=True)
    loss = policy_loss(
        new, new.detach(), torch.zeros(1000, dtype=torch.long), torch.ones(1), torch.ones(1), LossConfig()
    )
    assert loss.clipped == 0 and float(loss.ratios) == 1.0
