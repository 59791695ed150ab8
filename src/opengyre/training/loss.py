"""Policy losses as sums, so that micro-steps add up in any grouping.

All vectors are flat over the trainable tokens of the given trajectories: token m belongs to trajectory ``rows[m]``.
Prompt and masked tokens are not in them at all, so they can neither enter a ratio nor get a gradient. Every loss is

    L = - sum_k weight_k * sum_{t in T_k} w_t * objective_kt   [ + kl_weight * sum_k weight_k * sum_t k3_kt ]

with ``weight_k = 1 / N_e``, N_e the trainable tokens of trajectory k's execution, so that an execution weighs the same
however many trajectories it was cut into. The 1/E over executions is not in here: E is known only when the step closes,
and the core divides then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 10.0  # |log ratio| beyond this is a broken token, not a policy change; e^10 keeps float32 finite


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What the losses read of ``config.TrainConfig``; ``tis_cap`` None: no importance weight."""

    kind: Literal["gspo", "grpo", "cispo", "reinforce"] = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    tis_cap: float | None = None
    kl_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """``total`` is the differentiable sum. ``ratios`` (K,) are the sequence ratios s; ``clipped`` counts tokens."""

    total: Tensor
    ratios: Tensor
    clipped: int


def policy_loss(
    new: Tensor,
    behaviour: Tensor,
    rows: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: LossConfig,
    *,
    prox: Tensor | None = None,
    reference: Tensor | None = None,
) -> Loss:
    """The summed loss of K trajectories.

    Args:
        new: (M,) log-probabilities under the weights being trained; gradients flow through this alone.
        behaviour: (M,) recorded at sampling time.
        rows: (M,) trajectory index of each token, in 0..K-1.
        advantages: (K,); weights: (K,), 1/N_e each.
        prox: (M,) decoupled only: recomputed at the step's start. The clip is then around it, and the gap between it
            and the behaviour becomes a weight ``min(prox/behaviour, tis_cap)`` per token (decoupled objective: Hilton
            et al., arXiv 2110.00641; truncation: Espeholt et al., arXiv 1802.01561).
        reference: (M,) under the reference policy; needed when ``kl_weight`` is not 0.
    """
    old = behaviour if prox is None else prox
    log_ratio = (new.detach() - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratios = sequence_ratios(log_ratio, rows, len(advantages))
    # exp(new - sg[new]) is 1 in value and d(new) in gradient: the ratio's value is clamped, its gradient never dies.
    live = (new - new.detach()).exp()
    token_advantages = advantages[rows]
    if config.kind == "gspo":
        objective, clipped = _clipped(ratios[rows] * live, token_advantages, config)
    elif config.kind == "grpo":
        objective, clipped = _clipped(log_ratio.exp() * live, token_advantages, config)
    elif config.kind == "cispo":
        objective, clipped = _cispo(log_ratio.exp(), new, token_advantages, config)
    else:  # Williams, Machine Learning 8 (1992); with advantage 1 it is the cross-entropy of what was sampled
        objective, clipped = token_advantages * new, torch.zeros_like(new, dtype=torch.bool)
    if prox is not None and config.tis_cap is not None:
        gap = (prox - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        objective = objective * gap.exp().clamp(max=config.tis_cap)
    if config.kl_weight:
        if reference is None:
            raise ValueError("kl_weight needs reference log-probabilities")
        objective = objective - config.kl_weight * k3(new, reference)
    return Loss(-(weights[rows] * objective).sum(), ratios, int(clipped.sum()))


def sequence_ratios(log_ratio: Tensor, rows: Tensor, count: int) -> Tensor:
    """(K,) s = exp(mean over a trajectory's trainable tokens of the log-ratio); 1 for a trajectory without any.

    Source: GSPO, Zheng et al., arXiv 2507.18071, eq. 7.
    """
    sums = log_ratio.new_zeros(count).index_add_(0, rows, log_ratio)
    sizes = torch.bincount(rows, minlength=count).clamp(min=1)
    return (sums / sizes).exp()


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """min(r*A, clip(r)*A) per token, and where the clip took the gradient away.

    The token's ``r`` is sg[s]*pi/sg[pi] for GSPO (arXiv 2507.18071, eq. 13-14) and pi/pi_old for GRPO (Shao et al.,
    arXiv 2402.03300, eq. 3; PPO: arXiv 1707.06347, eq. 7).
    """
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free, held = ratio * advantages, bounded * advantages
    return torch.minimum(free, held), held < free


def _cispo(ratio: Tensor, new: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """sg[clip(r)] * A * log pi per token: a bounded weight, and no token loses its gradient.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4-5.
    """
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return bounded * advantages * new, bounded != ratio


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(new || reference) per token: exp(d) - d - 1 with d = reference - new; never negative.

    Source: Schulman, "Approximating KL Divergence" (2020), estimator k3. Beyond the limit it continues as a straight
    line, so that its gradient stays finite and keeps pulling.
    """
    gap = reference - new
    bounded = gap.clamp(max=LOG_RATIO_LIMIT)
    slope = math.exp(LOG_RATIO_LIMIT)
    estimate: Tensor = bounded.exp() + (gap - bounded) * slope - gap - 1.0
    return estimate
