"""Packs longer than memory: computed window by window, with exact gradients.

    forward, first to last       [w0] ─▶ [w1] ─▶ [w2]        keys and values of earlier windows are remembered,
                                   KV      KV                nothing else of them is
    backward, last to first      [w0] ◀─ [w1] ◀─ [w2]        each window is computed again, with a graph; what its
                                  dKV     dKV                 attention owes to earlier keys and values is added up
                                                              and enters their own backward pass

Who waits for what: a window's backward pass needs the sums of all later ones, so it runs in reverse order, when the
gradient of every log-probability is known: a ratio over a whole trajectory may reach over all windows. Memory is one
window's activations plus keys, values and their gradients of the row; work is that of gradient checkpointing (one more
forward pass).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opengyre.training.attention import Memory
from opengyre.training.pack import Pack, Window, windows

Compute = Callable[[Pack, Window, Memory | None], Tensor]  # -> log-probabilities of the window's trained tokens


def in_windows(packed: Pack, tokens: int, compute: Compute, anchor: Tensor) -> Tensor:
    """(M,) log-probabilities of a pack, ``tokens`` rows at a time.

    ``anchor``: a parameter; the result depends on it as far as autograd is told. Gradients of all parameters are added
    to their ``.grad`` by the backward pass.
    """
    result: Tensor = _InWindows.apply(anchor, packed, windows(packed, tokens), compute)  # type: ignore[no-untyped-call]
    return result


class _Rows:
    """Keys and values of a row and their gradients, by layer, shapes (1, H_kv, N, D). Implements ``Memory``.

    They lie row by row, as the model makes them, so that the first rows are dense.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._owed: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # of the window that is being computed, with its graph
        self._window = slice(0, 0)

    def enter(self, window: Window) -> _Rows:
        """The window that is computed next."""
        self._window, self._own = slice(window.first, window.last), {}
        return self

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a window's own keys and values; returns those before it, which collect their gradients."""
        if layer not in self._kept:
            self._kept[layer] = (self._empty(key), self._empty(value))
        before = tuple(x[:, :, : self._window.start].detach() for x in self._kept[layer])
        if not torch.is_grad_enabled():
            for kept, own in zip(self._kept[layer], (key, value), strict=True):
                kept[:, :, self._window] = own
            return before[0], before[1]
        self._own[layer] = (key, value)
        if layer not in self._owed:
            self._owed[layer] = (self._empty(key).zero_(), self._empty(value).zero_())
        for x, owed in zip(before, self._owed[layer], strict=True):
            x.requires_grad_()
            x.grad = owed[:, :, : self._window.start]  # autograd adds in place
        return before[0], before[1]

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, width = like.shape
        return like.new_empty(self._size, batch, heads, width).permute(1, 2, 0, 3)

    def debts(self) -> tuple[list[Tensor], list[Tensor]]:
        """The window's keys and values, and the gradients that later windows owe them."""
        own = [x for pair in self._own.values() for x in pair]
        owed = [x[:, :, self._window] for layer in self._own for x in self._owed[layer]]
        return own, owed


class _InWindows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, packed: Pack, cut: list[Window], compute: Compute) -> Tensor:  # type: ignore[override]
        rows = _Rows(len(packed.ids))
        parts = [compute(packed, window, rows.enter(window)) for window in cut]
        whole = parts[0].new_empty(len(packed.sources))
        for window, part in zip(cut, parts, strict=True):
            whole[torch.from_numpy(window.trained).to(whole.device)] = part
        ctx.rows, ctx.packed, ctx.cut, ctx.compute = rows, packed, cut, compute
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        for window in reversed(ctx.cut):
            with torch.enable_grad():
                part = ctx.compute(ctx.packed, window, ctx.rows.enter(window))
            own, owed = ctx.rows.debts()
            torch.autograd.backward([part, *own], [grad[torch.from_numpy(window.trained).to(grad.device)], *owed])
        return None, None, None, None
