"""The fast sibling of ``HFRunner`` for Llama-like decoders: plain torch ops on the module's own weights.

At the sizes a laptop trains (0.2 to a few million parameters) a decode step is bound by Python between the ops, so
the forward is written out with few of them: queries and keys are normalised and rotated together, grouped heads ride
as query length, the residual is added inside the projection. No weight is copied but the small norm vectors. Whether
it equals the model is not assumed: ``pick_runner`` compares logits when the engine is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from opengyre.rollout.torch_model import causal_bias
from opengyre.rollout.torch_rows import KVRows

FAMILIES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
SPLIT_TOKENS = 300  # an extra attention call costs about as much as reading this many padded tokens of a small layer


@dataclass(slots=True)
class _Layer:
    """A decoder layer's modules, and its norm weights times sqrt(width) (see ``_norm``)."""

    q: Any
    k: Any
    v: Any
    o: Any
    gate: Any
    up: Any
    down: Any
    w_in: Tensor
    w_mid: Tensor
    w_qk: Tensor | None


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last axis; ``weight`` holds w * sqrt(n) and ``epsilon`` n * eps, which saves the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(epsilon)) * weight


def supports(model: nn.Module) -> bool:
    """Whether ``DirectRunner`` may be tried: a known family in float32, full attention, static rotary positions."""
    config: Any = getattr(model, "config", None)
    if type(model).__name__ not in FAMILIES or next(model.parameters()).dtype != torch.float32:
        return False
    kinds = set(getattr(config, "layer_types", None) or [])
    sliding = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return not sliding and config.hidden_act == "silu" and rope in ("default", "linear", "llama3")


class DirectRunner:
    """Llama-like models, float32. Shapes: x [tokens, hidden], q [tokens, heads, dim]."""

    def __init__(self, model: nn.Module, context: int) -> None:
        net: Any = model
        config = net.config
        self.model, self.context = net, context
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden, self.epsilon = config.hidden_size, config.rms_norm_eps
        self.scale = self.dim**-0.5
        self._shape: list[int] = []
        self._spans: list[tuple[int, int]] = []
        with torch.inference_mode():
            self.refresh()

    def refresh(self) -> None:
        """See Runner: the rotary table and the scaled norm vectors."""
        body = self.model.model
        self.layers = [self._layer(layer) for layer in body.layers]
        self.w_out = body.norm.weight * self.hidden**0.5
        probe = body.embed_tokens.weight[:1]
        cos, sin = body.rotary_emb(probe, torch.arange(self.context, device=probe.device)[None])
        half = self.dim // 2
        self.cos, sin = cos[0], sin[0]
        self.sin = torch.cat((-sin[:, :half], sin[:, half:]), -1)  # rotate_half(x) * sin == roll(x) * this

    def _layer(self, layer: Any) -> _Layer:
        attn, mlp = layer.self_attn, layer.mlp
        norm_q, norm_k = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
        w_qk = None
        if norm_q is not None and norm_k is not None:
            queries = norm_q.weight.expand(self.heads, -1)
            w_qk = torch.cat((queries, norm_k.weight.expand(self.kv_heads, -1))) * self.dim**0.5
        return _Layer(
            attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
            layer.input_layernorm.weight * self.hidden**0.5,
            layer.post_attention_layernorm.weight * self.hidden**0.5,
            w_qk,
        )  # fmt: skip

    def prefill(self, rows: KVRows, row: int, ids: list[int]) -> Tensor:
        """See Runner."""
        start, n = rows.lengths[row], len(ids)
        end = start + n
        rows.extend(row, n)
        groups = self.heads // self.kv_heads
        bias = causal_bias(start, n, rows) if start and n > 1 else None  # from 0 the kernel skips the upper half itself

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = rows.keys[layer][row], rows.values[layer][row]
            keys[:, start:end], values[:, start:end] = k.transpose(0, 1), v.transpose(0, 1)
            # [n, kv, group, dim] -> [group, kv, n, dim]: the groups are a batch that shares keys at stride 0
            q = q.view(n, self.kv_heads, groups, self.dim).permute(2, 1, 0, 3)
            shape = (groups, -1, -1, -1)
            out = scaled_dot_product_attention(
                q,
                keys[None, :, :end].expand(shape),
                values[None, :, :end].expand(shape),
                attn_mask=bias,
                is_causal=start == 0 and n > 1,
                scale=self.scale,
            )
            return out.permute(2, 1, 0, 3).reshape(n, -1)

        return self._forward(ids, self.cos[start:end, None], self.sin[start:end, None], attend, last=True)[0]

    def decode(self, rows: KVRows, ids: list[int]) -> Tensor:
        """See Runner."""
        n = len(ids)
        lengths = rows.lengths[:n]
        rows.reserve(n, max(lengths) + 1)
        index, positions = rows.index[:n], torch.tensor(lengths, device=rows.device)
        rows.bias[index, positions] = 0
        rows.lengths[:n] = seen = [length + 1 for length in lengths]
        groups = self.heads // self.kv_heads
        parts = []
        shape = [length - seen[0] for length in seen]
        if shape != self._shape:  # rows grow in step: the cut holds until a row comes or goes
            self._shape, self._spans = shape, spans(seen)
        for a, b in self._spans:
            width = max(seen[a:b])
            mask = rows.bias[a:b, None, None, :width] if min(seen[a:b]) < width else None
            parts.append((a, b, width, mask))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = rows.keys[layer], rows.values[layer]
            keys[index, :, positions], values[index, :, positions] = k, v
            q = q.view(n, self.kv_heads, groups, self.dim)
            out = [
                scaled_dot_product_attention(
                    q[a:b], keys[a:b, :, :width], values[a:b, :, :width], attn_mask=mask, scale=self.scale
                )
                for a, b, width, mask in parts
            ]
            return (out[0] if len(out) == 1 else torch.cat(out)).reshape(n, -1)

        cos, sin = self.cos[positions, None], self.sin[positions, None]
        return self._forward(ids, cos, sin, attend, last=False)

    def _forward(
        self,
        ids: list[int],
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        last: bool,
    ) -> Tensor:
        body = self.model.model
        x = embedding(torch.tensor(ids, device=cos.device), body.embed_tokens.weight)
        n, heads, dim = len(ids), self.heads, self.dim
        eps, eps_dim = self.hidden * self.epsilon, dim * self.epsilon
        for number, layer in enumerate(self.layers):
            h = _norm(x, layer.w_in, eps)
            q, k = linear(h, layer.q.weight, layer.q.bias), linear(h, layer.k.weight, layer.k.bias)
            v = linear(h, layer.v.weight, layer.v.bias).view(n, -1, dim)
            qk = torch.cat((q, k), 1).view(n, -1, dim)
            if layer.w_qk is not None:
                qk = _norm(qk, layer.w_qk, eps_dim)
            qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
            h = attend(number, qk[:, :heads], qk[:, heads:], v)
            x = x + linear(h, layer.o.weight, layer.o.bias)
            h = _norm(x, layer.w_mid, eps)
            h = silu(linear(h, layer.gate.weight, layer.gate.bias)).mul_(linear(h, layer.up.weight, layer.up.bias))
            x = x + linear(h, layer.down.weight, layer.down.bias)
        if last:
            x = x[-1:]
        head = self.model.lm_head
        return linear(_norm(x, self.w_out, eps), head.weight, head.bias)


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    """Cut rows into runs of similar length, so that attention reads little padding.

    A run is padded to its longest row; it is split where that saves more than ``SPLIT_TOKENS`` tokens.
    """

    def cut(a: int, b: int) -> list[tuple[int, int]]:
        if b - a < 2:
            return [(a, b)]
        whole = max(lengths[a:b]) * (b - a)
        best, at = min((max(lengths[a:i]) * (i - a) + max(lengths[i:b]) * (b - i), i) for i in range(a + 1, b))
        return cut(a, at) + cut(at, b) if whole - best > SPLIT_TOKENS else [(a, b)]

    return cut(0, len(lengths))
