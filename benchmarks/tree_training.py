"""What packing trees and projecting only trainable positions save: forward + backward of the reference trainer.

    python benchmarks/tree_training.py [--tokens 8192] [--repeat 3]

Each line compares ways to compute the same gradient in one process, interleaved, best of ``--repeat``, in CPU seconds
of one thread (wall-clock figures mean little on a shared machine). ``separate`` runs every trajectory whole, in padded
batches; ``tree`` computes shared prefixes once; ``full head`` projects all positions on the vocabulary. The gradient
gap is between tree and separate, relative to the largest gradient.

Model: Qwen3, 0.36M parameters, vocabulary 512, 3 layers, hidden 128, float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opengyre.config import TrainConfig
from opengyre.record.types import Role
from opengyre.samples.types import Sample
from opengyre.training.pack import pack
from opengyre.training.torch_trainer import TorchTrainer

VOCAB = 512


def model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def branches(count: int, prefix: int, tail: int, sampled: float, seed: int = 0) -> list[Sample]:
    """``count`` trajectories with a common prefix; the last ``sampled`` part of each tail is trainable."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCAB, prefix)
    first = prefix + max(1 - min(1, prefix), round(tail * (1 - sampled)))
    samples = []
    for k in range(count):
        ids = np.concatenate([common, rng.integers(0, VOCAB, tail)]).astype(np.int32)
        mask = np.arange(len(ids)) >= first
        logprobs = np.where(mask, -np.log(VOCAB), np.nan).astype(np.float32)
        samples.append(
            Sample(
                sample_id=f"{seed}.{k}",
                execution_id=str(seed),
                query_id="q",
                role=Role.MAIN,
                ids=ids,
                mask=mask,
                logprobs=logprobs,
                advantage=1.0 if k % 2 else -1.0,
                weight=1.0 / mask.sum(),
                oldest_version=0,
                newest_version=0,
            )
        )
    return samples


def workloads(tokens: int) -> dict[str, list[Sample]]:
    """Name -> samples of about ``tokens`` unique tokens."""
    many = [s for i in range(16) for s in branches(1, 0, tokens // 16, 0.25, seed=i)]
    out = {"16 sequences, no sharing": many, "1 sequence": branches(1, 0, tokens, 0.25)}
    for sharing, count in ((2, 4), (4, 8), (8, 16)):
        # P + n*L = tokens unique; n*(P + L) = sharing * tokens in all
        prefix = round(tokens * (sharing - 1) / (count - 1))
        tail = (tokens - prefix) // count
        out[f"{sharing}x sharing, {count} leaves"] = branches(count, prefix, tail, 0.5)
    return out


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = TorchTrainer(
        model(), TrainConfig(micro_step_tokens=options.tokens, clip_low=9.0, clip_high=9.0), core=False
    )
    assert trainer.forward.trees and trainer.forward.head_split
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"{size / 1e6:.2f}M parameters, micro-steps of {options.tokens} tokens")

    def step(samples: list[Sample], *, trees: bool = True, split: bool = True) -> dict[str, np.ndarray]:
        trainer.forward.trees, trainer.forward.head_split = trees, split
        trainer.micro_step(samples)
        return trainer.take_gradients()

    for name, samples in workloads(options.tokens).items():
        ways: dict[str, Callable[[], object]] = {
            "tree": lambda s=samples: step(s),
            "separate": lambda s=samples: step(s, trees=False),
            "full head": lambda s=samples: step(s, split=False),
        }
        a, b = step(samples), step(samples, trees=False)
        scale = max(float(np.abs(x).max()) for x in b.values())
        gap = max(float(np.abs(a[n] - b[n]).max()) for n in a) / scale
        best = {way: min(times) for way, times in _interleaved(ways, options.repeat).items()}
        unique, total = len(pack(samples).ids), sum(len(s.ids) for s in samples)
        separate, full = best["separate"] / best["tree"], best["full head"] / best["tree"]
        print(
            f"{name:28} unique {unique:6} all {total:6}  tree {best['tree']:6.2f} s = {total / best['tree']:7.0f} tok/s"
            f"  separate/tree {separate:5.2f}  full head/tree {full:5.2f}"
            f"  gradient gap {gap:.0e}"
        )


def _interleaved(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, work in ways.items():
            times[way].append(cpu_seconds(work))
    return times


if __name__ == "__main__":
    main()
