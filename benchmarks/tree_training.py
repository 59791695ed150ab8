"""What packing trees, projecting only trainable positions and computing long rows in windows save in a training step.

    python benchmarks/tree_training.py [--tokens 4096 --tokens 16384] [--repeat 3] [--long 65536]

Each line compares ways to compute the same gradient, each in a fresh process of its own, taking turns: CPU seconds of
one thread, best of ``--repeat`` (wall-clock figures mean little on a shared machine), and what a step adds to the
process's peak resident size. ``separate`` runs every trajectory whole, in padded batches of the same budget; ``tree``
computes shared prefixes once; ``full head`` projects all positions on the vocabulary. The gradient gap is between tree
and separate, relative to the largest gradient. Then what a KL term to a reference model adds, and last, one path of
``--long`` tokens whole and in windows.

Model: Qwen3, 0.36M parameters, vocabulary 512, 3 layers, hidden 128, float32.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple

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


def trainer(window: int, *, kl: bool = False) -> TorchTrainer:
    """A satellite's trainer with micro-steps of ``window`` tokens; ``kl``: with a term to a reference model."""
    config = TrainConfig(
        micro_step_tokens=window, row_tokens=1 << 20, clip_low=9.0, clip_high=9.0, kl_weight=0.01 if kl else 0.0
    )
    made = TorchTrainer(model(), config, core=False, reference=model() if kl else None)
    assert made.forward.trees and made.forward.head_split
    return made


class Step(NamedTuple):
    """One micro-step in a process of its own."""

    seconds: float  # CPU
    mib: float  # what all steps so far added to the process's peak resident size
    gradients: dict[str, np.ndarray]


@cache
def warm(window: int, kl: bool) -> tuple[TorchTrainer, int]:
    """A trainer that has made its first step, and the process's peak then, KiB."""
    torch.set_num_threads(1)
    made = trainer(window, kl=kl)
    made.micro_step(branches(1, 0, 64, 0.5))  # what any first step allocates
    return made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def step(samples: list[Sample], window: int, trees: bool, split: bool, kl: bool = False) -> Step:
    """Runs in a process that does nothing else."""
    made, before = warm(window, kl)
    made.forward.trees, made.forward.head_split = trees, split
    made.take_gradients()
    start = time.process_time()
    made.micro_step(samples)
    seconds = time.process_time() - start
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Step(seconds, mib, made.take_gradients())


def steps(samples: list[Sample], ways: dict[str, tuple[int, bool, bool, bool]], repeat: int) -> dict[str, Step]:
    """The best step of each way (window, trees, split head, KL term); the ways take turns."""
    made: dict[str, list[Step]] = {way: [] for way in ways}
    with ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pools = {way: stack.enter_context(spawn.Pool(1)) for way in ways}
        for _ in range(repeat):
            for way, pool in pools.items():
                made[way].append(pool.apply(step, (samples, *ways[way])))
    return {way: min(each, key=lambda s: s.seconds) for way, each in made.items()}


def compare(name: str, samples: list[Sample], window: int, repeat: int) -> None:
    """Print one line."""
    ways = {
        "tree": (window, True, True, False),
        "separate": (window, False, True, False),
        "full head": (window, True, False, False),
    }
    best = steps(samples, ways, repeat)
    tree, separate, full = (best[way] for way in ways)
    scale = max(float(np.abs(x).max()) for x in separate.gradients.values())
    gap = max(float(np.abs(tree.gradients[n] - x).max()) for n, x in separate.gradients.items()) / scale
    unique, total = len(pack(samples).ids), sum(len(s.ids) for s in samples)
    ratio = separate.seconds / tree.seconds
    print(
        f"{name:20} unique {unique:6} all {total:6}  tree {tree.seconds:6.2f} s = {total / tree.seconds:7.0f} tok/s"
        f"  separate/tree {ratio:5.2f} = {ratio * unique / total:4.2f} of the sharing"
        f"  peak {tree.mib:5.0f} MiB, separate {separate.mib:5.0f}"
        f"  full head/tree {full.seconds / tree.seconds:4.2f}, peak {full.mib:5.0f}  gradient gap {gap:.0e}",
        flush=True,
    )


def reference(tokens: int, repeat: int) -> None:
    """Print what a KL term to a frozen reference model adds: its weights, and one forward pass without a graph."""
    ways = {"gspo": (tokens, True, True, False), "with KL": (tokens, True, True, True)}
    plain, kl = steps(shared(tokens, 4), ways, repeat).values()
    print(
        f"\nGSPO with a KL term, 4x sharing, unique {tokens}: {kl.seconds / plain.seconds:4.2f} of the time without,"
        f" peak {kl.mib:5.0f} MiB against {plain.mib:5.0f}",
        flush=True,
    )


def long_path(tokens: int) -> None:
    """Print what windows do to one path."""
    path = branches(1, 0, tokens, 0.25)
    whole = steps(path, {"": (tokens, True, True, False)}, 1)[""]
    print(f"\none path of {tokens} tokens: whole {whole.mib:6.0f} MiB, {whole.seconds:6.1f} s", flush=True)
    for window in (tokens // 8, tokens // 32):
        cut = steps(path, {"": (window, True, True, False)}, 1)[""]
        print(
            f"  in windows of {window:6}: {cut.mib:6.0f} MiB, {cut.seconds:6.1f} s"
            f"  memory whole/windows {whole.mib / cut.mib:5.2f}  time windows/whole {cut.seconds / whole.seconds:4.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, action="append", help="unique tokens of an execution; 4096 and 16384")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--long", type=int, default=65536, help="tokens of the long path; 0: leave it out")
    options = parser.parse_args()
    print(f"{sum(p.numel() for p in model().parameters()) / 1e6:.2f}M parameters, a micro-step an execution\n")
    sizes = options.tokens or [4096, 16384]
    for tokens in sizes:
        many = [s for i in range(16) for s in branches(1, 0, tokens // 16, 0.25, seed=i)]
        compare("16 paths, no sharing", many, tokens, options.repeat)
        for sharing in (2, 4, 8):
            compare(f"{2 * sharing} paths, {sharing}x sharing", shared(tokens, sharing), tokens, options.repeat)
    reference(sizes[0], options.repeat)
    if options.long:
        long_path(options.long)


if __name__ == "__main__":
    main()
