"""Drawing one token per call from a batch of logits, and the log-probability to record with it.

The uniform number behind a draw is a hash of (seed, position of the token), not the state of a generator. A call
therefore samples the same whatever shares its batch, and a call that was stopped and continued on another cell with
its seed goes on as if nothing had happened instead of reusing its first numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in (0, 1), one per (seed, position): the splitmix64 output function (Steele et al., 2014).

    Both are uint64 arrays of one shape; 32 bits are used, so that the result is never 0 or 1 in float64.
    """
    with np.errstate(over="ignore"):
        z = (seeds ^ (seeds >> np.uint64(31))) * np.uint64(0xD1342543DE82EF95)
        z = z + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    uniform: np.ndarray = ((z >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
    return uniform


class Sampling:
    """The sampling parameters of a batch as tensors, made once per batch composition.

    Args:
        settings: (temperature, top_p, top_k) per row. A temperature of 0 takes the most likely token.
    """

    def __init__(self, settings: list[tuple[float, float, int]], device: torch.device) -> None:
        self.greedy = torch.tensor([t == 0 for t, _, _ in settings], device=device)
        self.any_greedy = bool(self.greedy.any())
        self.all_greedy = bool(self.greedy.all())
        temperatures = torch.tensor([t or 1.0 for t, _, _ in settings], dtype=torch.float64, device=device)
        self.temperatures = temperatures[:, None]
        self.plain = all(t in (0, 1) for t, _, _ in settings)
        self.top_p = torch.tensor([p for _, p, _ in settings], dtype=torch.float64, device=device)[:, None]
        self.top_k = torch.tensor([k or 1 << 62 for _, _, k in settings], device=device)[:, None]
        self.truncated = any(p < 1 or k > 0 for _, p, k in settings)


def draw(logits: Tensor, sampling: Sampling, uniform: np.ndarray) -> tuple[list[int], list[float]]:
    """Draw a token per row of ``logits`` [rows, vocabulary] by inverting the cumulative distribution.

    The log-probability is ``log_softmax(logits / temperature)`` of the drawn token, in float32 (float64 for float64
    logits): after the temperature and before top-p/top-k, which is what a training forward can reproduce, so that
    the ratio on unchanged weights is 1. A greedy row is scored at temperature 1.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if not sampling.plain:
        logits = logits / sampling.temperatures.to(logits.dtype)
    logprobs = logits.log_softmax(-1)
    if sampling.all_greedy:
        ids = logprobs.argmax(-1)
    else:
        mass = logprobs.double().exp()
        if sampling.truncated:
            mass = _truncate(mass, sampling)
        cumulative = mass.cumsum(-1)
        target = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
        ids = (cumulative <= target).sum(-1)
        if sampling.any_greedy:
            ids = torch.where(sampling.greedy, logprobs.argmax(-1), ids)
        ids.clamp_(max=logits.shape[-1] - 1)  # only non-finite logits come here; their log-prob says so
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _truncate(mass: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k and top-p exclude; the most likely token always stays."""
    ordered, order = mass.sort(-1, descending=True)
    rank = torch.arange(mass.shape[-1], device=mass.device)
    before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens
    keep = (rank < sampling.top_k) & ((before < sampling.top_p) | (sampling.top_p >= 1))
    keep[:, 0] = True
    return torch.zeros_like(mass).scatter(-1, order, ordered * keep)
