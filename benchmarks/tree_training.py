"""What packing trees, projecting only trainable positions and computing long rows in windows save in a training step.

    python benchmarks/tree_training.py [--tokens 4096 --tokens 16384] [--repeat 3] [--long 65536]

Speed: each line compares ways to compute the same gradient in one process, interleaved, best of ``--repeat``, in CPU
seconds of one thread (wall-clock figures mean little on a shared machine). ``separate`` runs every trajectory whole, in
padded batches of the same token budget; ``tree`` computes shared prefixes once; ``full head`` projects all positions on
the vocabulary. The gradient gap is between tree and separate, relative to the largest gradient.

Memory: what a step adds to a fresh process's peak resident size, one process a way. Last, one path of ``--long`` tokens
whole and in windows.

Model: Qwen3, 0.36M parameters, vocabulary 512, 3 layers, hidden 128, float32.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
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


def shared(tokens: int, sharing: int) -> list[Sample]:
    """One execution of about ``tokens`` unique tokens whose trajectories have ``sharing`` times as many in all."""
    count = 2 * sharing
    # P + n*L = tokens unique; n*(P + L) = sharing * tokens in all
    prefix = round(tokens * (sharing - 1) / (count - 1))
    return branches(count, prefix, (tokens - prefix) // count, 0.5)


def trainer(window: int) -> TorchTrainer:
    """A satellite's trainer with micro-steps of ``window`` tokens."""
    config = TrainConfig(micro_step_tokens=window, row_tokens=1 << 20, clip_low=9.0, clip_high=9.0)
    made = TorchTrainer(model(), config, core=False)
    assert made.forward.trees and made.forward.head_split
    return made


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def speed(name: str, samples: list[Sample], window: int, repeat: int) -> None:
    """Print one line of the first table."""
    made = trainer(window)

    def step(*, trees: bool = True, split: bool = True) -> dict[str, np.ndarray]:
        made.forward.trees, made.forward.head_split = trees, split
        made.micro_step(samples)
        return made.take_gradients()

    ways: dict[str, Callable[[], object]] = {
        "tree": step,
        "separate": lambda: step(trees=False),
        "full head": lambda: step(split=False),
    }
    a, b = step(), step(trees=False)
    scale = max(float(np.abs(x).max()) for x in b.values())
    gap = max(float(np.abs(a[n] - b[n]).max()) for n in a) / scale
    best = {way: min(times) for way, times in _interleaved(ways, repeat).items()}
    unique, total = len(pack(samples).ids), sum(len(s.ids) for s in samples)
    separate, full = best["separate"] / best["tree"], best["full head"] / best["tree"]
    print(
        f"{name:24} unique {unique:6} all {total:6}  tree {best['tree']:6.2f} s = {total / best['tree']:7.0f} tok/s"
        f"  separate/tree {separate:5.2f} = {separate * unique / total:4.2f} of the sharing"
        f"  full head/tree {full:5.2f}  gradient gap {gap:.0e}",
        flush=True,
    )


def _interleaved(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeat):
        for way, work in ways.items():
            times[way].append(cpu_seconds(work))
    return times


def peak_mib(samples: list[Sample], window: int, *, trees: bool) -> tuple[float, float]:
    """(MiB that a step adds to the peak resident size of a fresh process, its CPU seconds)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (samples, window, trees))


def _peak(samples: list[Sample], window: int, trees: bool) -> tuple[float, float]:
    torch.set_num_threads(1)
    made = trainer(window)
    made.micro_step(branches(1, 0, 64, 0.5))  # what any first step allocates
    made.forward.trees = trees
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = cpu_seconds(lambda: made.micro_step(samples))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="unique tokens of an execution; 4096 and 16384")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--long", type=int, default=65536, help="tokens of the long path; 0: leave it out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = options.tokens or [4096, 16384]
    print(f"{sum(p.numel() for p in model().parameters()) / 1e6:.2f}M parameters, a micro-step an execution\n")
    for tokens in sizes:
        many = [s for i in range(16) for s in branches(1, 0, tokens // 16, 0.25, seed=i)]
        speed("16 paths, no sharing", many, tokens, options.repeat)
        for sharing in (2, 4, 8):
            speed(f"{2 * sharing} paths, {sharing}x sharing", shared(tokens, sharing), tokens, options.repeat)
    print()
    for tokens in sizes:
        for sharing in (2, 4, 8):
            samples = shared(tokens, sharing)
            tree, _ = peak_mib(samples, tokens, trees=True)
            separate, _ = peak_mib(samples, tokens, trees=False)
            print(
                f"{sharing}x sharing, unique {tokens:6}: peak of tree {tree:6.0f} MiB"
                f"  separate in batches of {tokens} tokens {separate:6.0f} MiB  separate/tree {separate / tree:4.2f}",
                flush=True,
            )
    if options.long:
        path = branches(1, 0, options.long, 0.25)
        whole, whole_s = peak_mib(path, options.long, trees=True)
        print(f"\none path of {options.long} tokens: whole {whole:6.0f} MiB, {whole_s:6.1f} s")
        for window in (options.long // 8, options.long // 32):
            mib, seconds = peak_mib(path, window, trees=True)
            print(
                f"  in windows of {window:6}: {mib:6.0f} MiB, {seconds:6.1f} s"
                f"  memory whole/windows {whole / mib:5.2f}  time windows/whole {seconds / whole_s:4.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
