"""Attention over packed trees, for any Hugging Face model that uses the standard attention interface.

Each chain's queries see the keys before it on its path and, causally, its own: exactly the work that is needed, where a
mask over the whole packed row would compute all N^2 pairs. Registered as ``ATTENTION``; the plan travels as a keyword
argument of the forward call, so nothing here is global and no model file is touched.

Two ways to the same numbers. Anywhere: torch's attention on concatenated keys, with a mask for blocks of queries. On a
CPU: torch's flash kernel on each stretch of keys where it lies, partial results merged by their log-sum-exp. That needs
no mask and no concatenation and computes only half of the own stretch: 1.2 times the speed of a whole micro-step.
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
FLASH_DEVICES = ("cpu",)
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what torch's own attention calls on a CPU
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
QUERY_BLOCK = 512  # queries per masked block: wastes at most half a block of keys a query, keeps masks small


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Who sees whom. ``chains`` cover the packed row in order; a run of ``before`` begins where a chain begins."""

    chains: tuple[Chain, ...]
    index: dict[int, int]  # start of a chain -> its index

    def work(self) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
        """Each chain's queries, and the stretches of keys they see: the last one, their own, causally."""
        for chain in self.chains:
            stretches = list[tuple[int, int]]()
            for start, length in chain.before:
                if stretches and stretches[-1][1] == start:
                    stretches[-1] = (stretches[-1][0], start + length)
                else:
                    stretches.append((start, start + length))
            own = slice(chain.own[0], sum(chain.own))
            yield own, [*((slice(a, b), False) for a, b in stretches), (own, True)]

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
    if query.device.type in FLASH_DEVICES and sliding_window is None and query.shape[-1] == value.shape[-1]:
        flash: Tensor = _FlashTree.apply(query, key, value, tree, scaling)  # type: ignore[no-untyped-call]
        return flash.transpose(1, 2), None
    lengths = [chain.own[1] for chain in tree.chains]
    queries, keys, values = (torch.split(x, lengths, dim=2) for x in (query, key, value))  # one backward for all chains
    outputs = []
    for i, chain in enumerate(tree.chains):
        before = [(tree.index[start], length) for start, length in chain.before]
        k = torch.cat([keys[j][:, :, :n] for j, n in before] + [keys[i]], dim=2) if before else keys[i]
        v = torch.cat([values[j][:, :, :n] for j, n in before] + [values[i]], dim=2) if before else values[i]
        outputs.append(_attend(queries[i], k, v, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class _FlashTree(torch.autograd.Function):
    """Attention of every chain to every stretch, with the CPU flash kernel of torch.

    The softmax over all a query sees is the stretches' softmaxes weighted by exp(lse_i - lse) (Milakov and Gimelshein,
    arXiv 1805.02867). The kernel's backward needs of the whole only its output and its log-sum-exp, so each stretch's
    gradient is its own call (as in ring attention: Liu et al., arXiv 2310.01889).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, scale: float | None
    ) -> Tensor:
        outputs, sums = list[Tensor](), list[Tensor]()
        for own, stretches in tree.work():
            q, out, lse = query[:, :, own], None, None
            for seen, causal in stretches:
                part, part_lse = _FLASH(q, key[:, :, seen], value[:, :, seen], 0.0, causal, scale=scale)
                if out is None or lse is None:
                    out, lse = part, part_lse
                    continue
                merged = torch.logaddexp(lse, part_lse)
                out = out * (lse - merged).exp().unsqueeze(-1) + part * (part_lse - merged).exp().unsqueeze(-1)
                lse = merged
            assert out is not None and lse is not None
            outputs.append(out.to(query.dtype))  # 16-bit parts were merged in the float32 of their log-sum-exp
            sums.append(lse)
        ctx.save_for_backward(query, key, value, *outputs, *sums)
        ctx.tree, ctx.scale = tree, scale
        return torch.cat(outputs, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        query, key, value, *saved = ctx.saved_tensors
        outputs, sums = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        to_query, to_key, to_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for (own, stretches), out, lse in zip(ctx.tree.work(), outputs, sums, strict=True):
            g, q = grad[:, :, own], query[:, :, own]
            for seen, causal in reversed(stretches):
                k, v = key[:, :, seen], value[:, :, seen]
                parts = _FLASH_BACKWARD(g, q, k, v, out, lse, 0.0, causal, scale=ctx.scale)
                if causal:  # a chain's own stretch comes first, and before any chain behind it adds to it
                    to_query[:, :, own], to_key[:, :, own], to_value[:, :, own] = parts
                else:
                    to_query[:, :, own] += parts[0]
                    to_key[:, :, seen] += parts[1]
                    to_value[:, :, seen] += parts[2]
        return to_query, to_key, to_value, None, None


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
