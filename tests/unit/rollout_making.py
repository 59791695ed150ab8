"""Tiny random models, engines on them, and the plain forward they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from opengyre.rollout.base import GenerateRequest, TokenChunk
from opengyre.rollout.torch_engine import TorchEngine

torch.set_num_threads(1)  # tests share the machine; idle OpenMP threads spin
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=20),  # every layer slides
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=20, query_pre_attn_scalar=8
    ),  # layers differ
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def make_model(kind: str = "qwen3", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model whose next-token distributions are far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as ones and zeros, which would hide their misuse
                parameter.data += 0.3 * torch.randn_like(parameter)
        return model


def make_engine(model: Any, **changes: Any) -> TorchEngine:
    sizes = {"kv_tokens": 600, "max_batch": 4, "prefill_chunk": 16, "context": 128, "emit_every": 3, "seed": 1}
    return TorchEngine(model, name="cell-0", device="cpu", **(sizes | changes))


def request(call_id: str, prompt: list[int], new: int = 12, **changes: Any) -> GenerateRequest:
    values = {"session": "s", "stop_token_ids": [], "temperature": 0.0} | changes
    return GenerateRequest(call_id, prompt_ids=prompt, max_new_tokens=new, **values)


def tokens(seed: int, n: int) -> list[int]:
    """Deterministic prompt ids."""
    return [(seed * 31 + i * i * 7 + i * 3) % VOCAB for i in range(n)]


class Heard:
    """What came out of engines, per call."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[TokenChunk]] = {}

    def add(self, chunks: list[tuple[str, TokenChunk]]) -> None:
        for call_id, chunk in chunks:
            assert len(chunk.ids) == len(chunk.logprobs)
            assert self.finish(call_id) in (None, "preempted"), f"{call_id} spoke after its last chunk"
            self.chunks.setdefault(call_id, []).append(chunk)

    def ids(self, call_id: str) -> list[int]:
        return [i for chunk in self.chunks.get(call_id, []) for i in chunk.ids]

    def logprobs(self, call_id: str) -> list[float]:
        return [p for chunk in self.chunks.get(call_id, []) for p in chunk.logprobs]

    def versions(self, call_id: str) -> list[int]:
        return [chunk.version for chunk in self.chunks.get(call_id, []) for _ in chunk.ids]

    def finish(self, call_id: str) -> str | None:
        chunks = self.chunks.get(call_id)
        return chunks[-1].finish if chunks else None

    def run(self, engine: TorchEngine) -> Heard:
        while engine.busy:
            self.add(engine.step())
        return self


def plain_logprobs(model: Any, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / T) [sampled, vocabulary] of one plain forward, no cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0]
    at = len(prompt) - 1
    return (logits[at : at + len(sampled)] / temperature).log_softmax(-1)


def assert_logprobs(model: Any, prompt: list[int], heard: Heard, call_id: str, temperature: float = 1.0) -> None:
    """The recorded log-probs equal those of a plain forward: 1e-5 in float32, 1e-10 in float64."""
    ids = heard.ids(call_id)
    expected = plain_logprobs(model, prompt, ids, temperature)
    chosen = expected[torch.arange(len(ids)), torch.tensor(ids)]
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    got = torch.tensor(heard.logprobs(call_id), dtype=expected.dtype)
    torch.testing.assert_close(got, chosen, rtol=tolerance, atol=tolerance)
