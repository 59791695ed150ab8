"""Tiny models and samples for the training tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.record.types import Role
from opengyre.samples.types import Sample

VOCAB = 64


def tiny_qwen3(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Qwen3ForCausalLM:
    """A 20k-parameter Qwen3. In float64 its norms are too: Hugging Face computes them in float32 whatever the dtype."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).to(dtype)
    if dtype == torch.float64:
        exact_norms(model)
    return model


def exact_norms(model: nn.Module) -> None:
    """Replace RMS norms by torch's, which compute in the dtype they are given."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=1e-6, dtype=child.weight.dtype)
                norm.weight = child.weight
                setattr(parent, name, norm)


def make_sample(
    ids: Any,
    mask: Any,
    *,
    name: str = "s",
    execution: str = "e",
    logprobs: Any = None,
    advantage: float = 1.0,
    weight: float = 1.0,
) -> Sample:
    """A sample with uniform behaviour log-probabilities unless given."""
    mask = np.asarray(mask, bool)
    if logprobs is None:
        logprobs = np.where(mask, -np.log(VOCAB), np.nan)
    return Sample(
        sample_id=name,
        execution_id=execution,
        query_id="q",
        role=Role.MAIN,
        ids=np.asarray(ids, np.int32),
        mask=mask,
        logprobs=np.asarray(logprobs, np.float32),
        advantage=advantage,
        weight=weight,
        oldest_version=0,
        newest_version=0,
    )


def random_samples(
    seed: int, executions: int = 4, paths: int = 3, prompt: int = 12, tail: int = 9, *, noise: float = 2e-4
) -> list[Sample]:
    """Executions of several trajectories that share a prompt; weights are 1/N_e; tokens are trained once.

    Log-probabilities are those of a uniform policy plus ``noise``; pass real ones where the ratio matters.
    """
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCAB, prompt // 2)
    samples = []
    for e in range(executions):
        shared = np.concatenate([common, rng.integers(0, VOCAB, prompt - prompt // 2)])
        ids, masks = [], []
        for k in range(paths):
            own = rng.integers(0, VOCAB, tail + int(rng.integers(0, 4)))
            if k == 2:  # branches off the first trajectory, inside its sampled tokens
                own[: tail // 2] = ids[0][prompt : prompt + tail // 2]
            path = np.concatenate([shared, own])
            mask = np.arange(len(path)) >= prompt + (tail // 2 if k == 2 else 0)
            mask &= rng.random(len(path)) > 0.2
            ids.append(path)
            masks.append(mask)
        weight = 1.0 / max(1, sum(int(m.sum()) for m in masks))
        advantage = float(rng.normal())
        for k, (path, mask) in enumerate(zip(ids, masks, strict=True)):
            old = np.where(mask, -np.log(VOCAB) + noise * rng.normal(size=len(path)), np.nan)
            samples.append(
                make_sample(
                    path, mask, name=f"e{e}k{k}", execution=f"e{e}", logprobs=old, advantage=advantage, weight=weight
                )
            )
    return samples
