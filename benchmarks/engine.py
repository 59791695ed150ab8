"""Tokens per second of the embedded engine against transformers' own generate, in one run on one CPU thread.

    python benchmarks/engine.py [--prompt 600] [--tokens 64] [--layers 4] [--hidden 128]

Both sides get the same prompts (prefilled inside the measured time) and the same number of greedy tokens. Time is CPU
time of the one thread, so that neighbours on a shared machine disturb little. The engine
is measured twice: through the model's own forward and, where the model allows, through the direct one. The last lines
measure what an agent's turns look like: growing prompts whose prefix is cached.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.rollout.base import GenerateRequest
from opengyre.rollout.torch_engine import TorchEngine

CONTEXT = 4096


def build(layers: int, hidden: int) -> Qwen3ForCausalLM:
    """A random Qwen3 of the size the quickstart trains."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def engine(model: Qwen3ForCausalLM, *, fast: bool) -> TorchEngine:
    return TorchEngine(
        model, name="bench", kv_tokens=65536, max_batch=16, prefill_chunk=512, context=CONTEXT, device="cpu", fast=fast
    )


def drain(eng: TorchEngine, prompts: list[list[int]], tokens: int, tag: str) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        eng.submit(GenerateRequest(f"{tag}-{i}", "bench", prompt, tokens, [], temperature=0.0))
    out: dict[str, list[int]] = {f"{tag}-{i}": [] for i in range(len(prompts))}
    while eng.busy:
        for call_id, chunk in eng.step():
            out[call_id] += chunk.ids
    return list(out.values())


def generate(model: Qwen3ForCausalLM, prompts: list[list[int]], tokens: int) -> None:
    """Left-padded generate with a dynamic cache, its default."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )


def turns(model: Qwen3ForCausalLM, prompt: int, rng: random.Random) -> None:
    """16 conversations of 6 turns over one shared system prompt."""
    eng = engine(model, fast=True)
    system = [rng.randrange(512) for _ in range(prompt)]
    talks = [[*system, *(rng.randrange(512) for _ in range(20))] for _ in range(16)]
    began, sampled = time.process_time(), 0
    for turn in range(6):
        answers = drain(eng, talks, 40, f"t{turn}")
        sampled += sum(map(len, answers))
        talks = [
            [*talk, *answer, *(rng.randrange(512) for _ in range(60))]
            for talk, answer in zip(talks, answers, strict=True)
        ]
    seconds = time.process_time() - began
    seen = eng.metrics.cached_tokens + eng.metrics.prefill_tokens
    print(f"16 conversations, 6 turns: {sampled / seconds:,.0f} tok/s; {eng.metrics.cached_tokens / seen:.1%} cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=600, help="longest prompt, tokens; the shortest is a half of it")
    parser.add_argument("--tokens", type=int, default=64, help="tokens sampled per call")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many runs counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rng = build(args.layers, args.hidden), random.Random(0)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Qwen3 {parameters / 1e6:.2f}M, prompts {args.prompt // 2}-{args.prompt}, {args.tokens} tokens each")
    for batch in (1, 16):
        best = {"generate": 1e9, "engine (own forward)": 1e9, "engine (direct)": 1e9}
        for _ in range(args.repeat):
            lengths = [args.prompt - (args.prompt // 2) * i // 16 for i in range(batch)]
            prompts = [[rng.randrange(512) for _ in range(n)] for n in lengths]
            for kind in best:
                eng = engine(model, fast="direct" in kind) if "engine" in kind else None
                began = time.process_time()
                if eng is None:
                    generate(model, prompts, args.tokens)
                else:
                    drain(eng, prompts, args.tokens, "b")
                best[kind] = min(best[kind], time.process_time() - began)
        for kind, seconds in best.items():
            rate, ratio = batch * args.tokens / seconds, best["generate"] / seconds
            print(f"batch {batch:2}  {kind:21} {rate:8,.0f} tok/s   {ratio:5.2f} x generate")
    turns(model, args.prompt, rng)


if __name__ == "__main__":
    main()
