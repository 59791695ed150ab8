"""The KV memory of the calls an engine is working on: one row per call, decoding rows packed at the front.

    row   0 … running-1     decoded together: one slice [:running, :, :width] of every layer, no gather, no index
    row   running           the one call being prefilled, if any

Rows and row length grow by doubling, so memory follows what is used and a step never rebuilds a mask: ``bias`` holds 0
where a row has KV and the most negative number elsewhere, and one element per row changes each step. All rows are as
long as the longest call so far: at most max_rows times context tokens, given back only by ``free_memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIRST_LENGTH = 256  # tokens of a row at first: most tool turns of a small policy fit, doubling covers the rest
Layout = list[tuple[int, int, int]]  # per layer: KV heads, key dim, value dim (they differ in latent attention)


class KVRows:
    """Row buffers ``keys[layer]``, ``values[layer]`` of shape [rows, heads, length, dim] and each row's token count."""

    def __init__(
        self, layout: Layout, *, max_rows: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.max_rows, self.context = layout, max_rows, context
        self.dtype, self.device = dtype, device
        self.masked = torch.finfo(dtype).min  # finite: an all-masked block of a fused kernel must not become NaN
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths: list[int] = [0] * max_rows
        self.free_memory()

    @property
    def used(self) -> int:
        """Tokens held over all rows."""
        return sum(self.lengths)

    def free_memory(self) -> None:
        """Drop the buffers; the next write allocates anew."""
        self._rows = self._length = 0
        self.lengths = [0] * self.max_rows
        self.keys, self.values = [], []
        self.bias = torch.empty(0, 0, dtype=self.dtype, device=self.device)
        self.index = torch.arange(self.max_rows, device=self.device)
        self.columns = torch.arange(self.context, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens."""
        if rows <= self._rows and length <= self._length:
            return
        old_rows, old_length = self._rows, self._length
        self._rows = max(old_rows, min(self.max_rows, 1 << (rows - 1).bit_length()))
        self._length = max(old_length, min(self.context, max(FIRST_LENGTH, 1 << (length - 1).bit_length())))

        def grown(old: Tensor | None, heads: int, dim: int) -> Tensor:
            # Zeros, not empty: masked positions get weight 0, and 0 times leftover garbage could be NaN.
            new = torch.zeros(self._rows, heads, self._length, dim, dtype=self.dtype, device=self.device)
            if old is not None:
                new[:old_rows, :, :old_length] = old
            return new

        for layer, (heads, key_dim, value_dim) in enumerate(self.layout):
            had = layer < len(self.keys)
            key = grown(self.keys[layer] if had else None, heads, key_dim)
            value = grown(self.values[layer] if had else None, heads, value_dim)
            self.keys[layer : layer + 1], self.values[layer : layer + 1] = [key], [value]
        bias = torch.full((self._rows, self._length), self.masked, dtype=self.dtype, device=self.device)
        bias[:old_rows, :old_length] = self.bias
        self.bias = bias

    def clear(self, row: int) -> None:
        """Forget a row's tokens."""
        if self.lengths[row]:
            self.bias[row, : self.lengths[row]] = self.masked
            self.lengths[row] = 0

    def extend(self, row: int, tokens: int) -> None:
        """Count ``tokens`` more tokens of ``row`` as valid (their KV is written by the caller)."""
        start = self.lengths[row]
        self.reserve(row + 1, start + tokens)
        self.bias[row, start : start + tokens] = 0
        self.lengths[row] = start + tokens

    def move(self, source: int, target: int) -> None:
        """Move a row's KV to another row; the source is empty after."""
        if source == target:
            return
        self.clear(target)
        length = self.lengths[source]
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]
        self.extend(target, length)
        self.clear(source)

    def append(self, row: int, segment: Sequence[Tensor], tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a segment (K, V of layer 0, K, V of layer 1, …) to the row's end."""
        start = self.lengths[row]
        self.extend(row, tokens)
        for layer in range(len(self.layout)):
            self.keys[layer][row, :, start : start + tokens] = segment[2 * layer][:, :tokens]
            self.values[layer][row, :, start : start + tokens] = segment[2 * layer + 1][:, :tokens]

    def copy_out(self, row: int, start: int, end: int) -> list[Tensor]:
        """Copy tokens [start, end) of a row as a segment: K and V per layer, [heads, tokens, dim]."""
        segment = []
        for key, value in zip(self.keys, self.values, strict=True):
            segment += [key[row, :, start:end].clone(), value[row, :, start:end].clone()]
        return segment


def to_arrays(segment: Sequence[Tensor]) -> dict[str, Any]:
    """A segment as numpy arrays k0, v0, k1, v1, …; bfloat16 as uint16 bit patterns, numpy has no such type."""
    arrays = {}
    for i, tensor in enumerate(segment):
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        arrays[f"{'kv'[i % 2]}{i // 2}"] = bits.cpu().numpy()
    return arrays


def from_arrays(
    arrays: dict[str, Any], tokens: int, layout: Layout, dtype: torch.dtype, device: torch.device
) -> list[Tensor] | None:
    """The segment of ``tokens`` tokens that ``to_arrays`` wrote, or None if an array is missing or does not fit."""
    wire = torch.empty(0, dtype=torch.uint16 if dtype == torch.bfloat16 else dtype).numpy().dtype
    segment = []
    for layer, (heads, *dims) in enumerate(layout):
        for kind, dim in zip("kv", dims, strict=True):
            array = arrays.get(f"{kind}{layer}")
            if not isinstance(array, np.ndarray) or array.dtype != wire or array.shape != (heads, tokens, dim):
                return None
            tensor = torch.tensor(array)  # a copy: what came from elsewhere may be read-only or change
            segment.append(tensor.view(dtype).to(device))
    return segment
