"""Attention over packed trees, for any Hugging Face model that uses the standard attention interface.

Each chain's queries see the keys before it on its path and, causally, its own: exactly the work that is needed, where a
mask over the whole packed row would compute all N^2 pairs. Registered as ``ATTENTION``; the plan travels as a keyword
argument of the forward call, so nothing here is global and no model file is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from opengyre.errors import TrainingError
from opengyre.training.pack import Chain

ATTENTION = "opengyre_tree"
QUERY_BLOCK = 512  # queries per masked block: wastes at most half a block of keys a query, keeps masks small


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Who sees whom. ``chains`` cover the packed row in order; a run of ``before`` begins where a chain begins."""

    chains: tuple[Chain, ...]
    index: dict[int, int]  # start of a chain -> its index

    @classmethod
    def of(cls, chains: tuple[Chain, ...]) -> TreePlan:
        """The plan of a pack's chains."""
        return cls(chains, {chain.own[0]: i for i, chain in enumerate(chains)})


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreePlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function: query (1, H, N, D), key and value (1, H_kv, N, D) -> (1, N, H, D).

    Raises:
        TrainingError: called without a plan, or by a model whose attention is more than softmax(QK)V.
    """
    if tree is None or attention_mask is not None or softcap is not None or s_aux is not None:
        raise TrainingError("this model's attention cannot run on packed trees", where=type(module).__name__)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = [chain.own[1] for chain in tree.chains]
    queries, keys, values = (torch.split(x, lengths, dim=2) for x in (query, key, value))  # one backward for all chains
    outputs = []
    for i, chain in enumerate(tree.chains):
        before = [(tree.index[start], length) for start, length in chain.before]
        k = torch.cat([keys[j][:, :, :n] for j, n in before] + [keys[i]], dim=2) if before else keys[i]
        v = torch.cat([values[j][:, :, :n] for j, n in before] + [values[i]], dim=2) if before else values[i]
        outputs.append(_attend(queries[i], k, v, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    """The last L of K positions attend causally to all K, or to the last ``window`` of them."""
    new, total = query.shape[2], key.shape[2]
    windowed = window is not None and total > window
    if new == total and not windowed:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    blocks = []
    for first in range(0, new, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, new)
        low, high = 0, total - new + last  # keys this block can see
        if window is not None and windowed:
            low = max(0, high - (last - first) - window + 1)
        mask = torch.ones(last - first, high - low, dtype=torch.bool, device=query.device)
        mask = mask.tril_(high - low - (last - first))
        if window is not None and windowed:
            mask = mask.triu_(high - low - (last - first) - window + 1)
        blocks.append(
            scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], attn_mask=mask, scale=scale
            )
        )
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


AttentionInterface.register(ATTENTION, tree_attention)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Run with another attention implementation, then put the model's own back: the rollout engine may share it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
