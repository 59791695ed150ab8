"""FlexAttention over packed trees: one kernel for the whole row, for GPUs.

Rows are in depth-first order, so the rows that see row j are j itself and an unbroken run after it: its subtree. One
number a row, where that run ends, is the whole mask:

    row i sees row j   iff   j <= i < ends[j]

Written against torch.nn.attention.flex_attention of torch 2.13. Its backward pass exists on CUDA only: there, this has
not been run by us yet; the mask and the forward pass are tested on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from opengyre.training.pack import Chain


def ends(chains: tuple[Chain, ...], device: torch.device) -> Tensor:
    """(N,) for each row, the first later row that does not see it any more."""
    out = torch.zeros(sum(chains[-1].own), dtype=torch.int32)
    for chain in chains:  # in order, so that later ends overwrite earlier ones
        last = sum(chain.own)
        for start, length in (*chain.before, chain.own):
            out[start : start + length] = last
    return out.to(device)


def flex_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chains: tuple[Chain, ...],
    origin: int,
    scale: float | None,
    made: dict[str, Any],
) -> Tensor:
    """Attention of rows ``origin`` on, query (1, H, n, D), to all rows, key and value (1, H_kv, N, D) -> (1, H, n, D).

    ``made`` keeps the block mask for the other layers of the same plan.
    """
    if "flex" not in made:
        stop = ends(chains, query.device)

        def visible(_batch: Tensor, _head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
            row = asking + origin
            return (seen <= row) & (row < stop[seen])

        made["flex"] = create_block_mask(visible, None, None, query.shape[2], key.shape[2], device=query.device.type)
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = _kernel(query.device.type)(
        query, key, value, block_mask=made["flex"], scale=scale, enable_gqa=grouped
    )
    return out


@cache
def _kernel(device: str) -> Any:
    """Compiled where there is a compiled kernel; row lengths differ from pack to pack."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
