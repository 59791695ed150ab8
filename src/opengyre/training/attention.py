"""Attention over packed trees, for any Hugging Face model that uses the standard attention interface.

Each chain's queries see the keys before it on its path and, causally, its own: exactly the work that is needed, where a
mask over the whole packed row would compute all N^2 pairs. Registered as ``ATTENTION``; the plan travels as a keyword
argument of the forward call, so nothing here is global and no model file is touched.

Three ways to the same numbers. Anywhere: torch's attention on concatenated keys, with a mask for blocks of queries. On
a CPU: torch's flash kernel on blocks of the row, siblings asking about their prefix together (``flash.py``). On a GPU:
FlexAttention, one kernel for the whole row (``flex.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from opengyre.errors import TrainingError
from opengyre.training.flash import Blocks, FlashTree
from opengyre.training.flex import flex_tree
from opengyre.training.pack import Chain

ATTENTION = "opengyre_tree"
FLASH_DEVICES, FLEX_DEVICES = ("cpu",), ("cuda",)
QUERY_BLOCK = 512  # queries per masked block: wastes at most half a block of keys a query, keeps masks small


class Memory(Protocol):
    """Keys and values of the rows before a window, by layer."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a window's own keys and values; returns those before it, shapes (1, H_kv, origin, D)."""
        ...


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Who sees whom, for the rows from ``origin`` on; earlier rows are in ``memory``.

    ``chains`` cover the packed row in order up to the last query; a run of ``before`` begins where a chain begins and
    lies on one side of ``origin``.
    """

    chains: tuple[Chain, ...]
    index: dict[int, int]  # start of a chain -> its index
    origin: int = 0
    memory: Memory | None = None
    made: dict[str, Any] = field(default_factory=dict, compare=False)  # by a kernel of this plan, once for all layers

    @classmethod
    def of(cls, chains: tuple[Chain, ...], origin: int = 0, memory: Memory | None = None) -> TreePlan:
        """The plan of a pack's chains, or of one window of it."""
        return cls(chains, {chain.own[0]: i for i, chain in enumerate(chains)}, origin, memory)

    @property
    def asking(self) -> tuple[Chain, ...]:
        """The chains whose queries are computed."""
        return tuple(chain for chain in self.chains if chain.own[0] >= self.origin)


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
    past = (key[:, :, :0], value[:, :, :0])  # nothing is remembered
    if tree.memory is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]
        past = tree.memory.extend(layer, key, value)
    if query.device.type in FLEX_DEVICES and sliding_window is None:
        keys, values = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return flex_tree(query, keys, values, tree.chains, tree.origin, scaling, tree.made).transpose(1, 2), None
    if query.device.type in FLASH_DEVICES and sliding_window is None and query.shape[-1] == value.shape[-1]:
        if "flash" not in tree.made:
            tree.made["flash"] = Blocks.of(tree.chains, tree.origin)
        flash: Tensor = FlashTree.apply(query, key, value, *past, tree.made["flash"], scaling)  # type: ignore[no-untyped-call]
        return flash, None
    key, value = _repeat(key, groups), _repeat(value, groups)
    lengths = [chain.own[1] for chain in tree.chains]
    n_past = len(tree.chains) - len(tree.asking)
    queries = torch.split(query, lengths[n_past:], dim=2)  # one backward for all chains
    keys_of, values_of = (
        [*torch.split(_repeat(before, groups), lengths[:n_past], dim=2), *torch.split(own, lengths[n_past:], dim=2)]
        for before, own in zip(past, (key, value), strict=True)
    )
    outputs = []
    for i, chain in enumerate(tree.asking, start=n_past):
        before = [(tree.index[start], length) for start, length in chain.before]
        k = torch.cat([keys_of[j][:, :, :n] for j, n in before] + [keys_of[i]], dim=2)
        v = torch.cat([values_of[j][:, :, :n] for j, n in before] + [values_of[i]], dim=2)
        outputs.append(_attend(queries[i - n_past], k, v, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _repeat(x: Tensor, groups: int) -> Tensor:
    """One key head per query head."""
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


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
