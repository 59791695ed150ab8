"""Make the shipped policy: ``python -m opengyre.quickstart.make_policy --out DIR`` (one core, about five minutes).

    demonstrations -> tokenizer -> drills, then demonstrations, tokenised -> next-token training on replies -> DIR

The result is a competent but unreliable agent: its calls are well formed, and it makes the demonstrator's mistakes (see
``demonstrator.Habits``) about as often as the demonstrator. The same seed gives the same policy on the same machine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from opengyre.proxy.conversation import Conversation
from opengyre.proxy.render import Renderer
from opengyre.quickstart import tokenizer
from opengyre.quickstart.demonstrations import demonstrate, drill, said, sequence
from opengyre.quickstart.demonstrator import Habits
from opengyre.quickstart.tasks import Blueprint, draw, functions_of

log = logging.getLogger(__name__)

BIG_SHARE = 0.4  # of demonstrations with a second module; more than in the tasks, as they show more kinds of turns
_WEIGHTS = {"assistant": 2, "tool": 3}  # in the tokenizer's corpus: a requirement should be one token and a digit
CORPUS = 600  # executions the tokenizer is trained on
PROMPT_WEIGHT = 0.3  # of a prompt token's loss in the first half of training: copying is learned from prompts too
PADDING = -1
DRILLS = 8000  # about 600 batches
WARMUP = 50  # steps
MUON_RATE = 0.02  # of the matrices, whose updates have unit singular values
Sequence = tuple[list[int], list[bool]]
Batch = tuple[torch.Tensor, torch.Tensor]


def config() -> Qwen3Config:
    """A third of a million parameters in two layers, the fewest that can look something up and copy it."""
    return Qwen3Config(
        vocab_size=tokenizer.VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def blueprints(seed: int) -> Iterator[tuple[Blueprint, Random]]:
    """Training tasks without end, each with the random stream of its execution."""
    functions = functions_of("train")
    for i in itertools.count():
        rng = Random(f"demonstration/{seed}/{i}")
        yield draw(rng, functions, big=rng.random() < BIG_SHARE), rng


def corpus(seed: int, habits: Habits) -> Iterator[str]:
    """Texts between markers; what every history begins with is left to single characters, as it is prefilled once."""

    def count(conversation: Conversation) -> int:
        return 60 + sum(len(m.text) + 30 for m in conversation.messages) // 6

    for blueprint, rng in itertools.islice(blueprints(seed), CORPUS):
        for history in demonstrate(blueprint, rng, habits, count).histories:
            for message in history.messages:
                yield f"{message.role}\n"
                text = said(message) if message.role == "assistant" else message.text
                weight = _WEIGHTS.get(message.role, 0)
                yield from weight * [piece for piece in re.split(r"</?tool_call>", text) if piece]


def sequences(renderer: Renderer, seed: int, habits: Habits, tokens: int) -> list[Sequence]:
    """Demonstrations worth ``tokens`` tokens; compaction happens where it will at run time."""
    made: list[Sequence] = []
    total = executions = passed = calls = 0

    @lru_cache(maxsize=4096)
    def length(text: str) -> int:
        return len(renderer.encode(text)) + 4  # the two markers, the role and the newline around it

    def count(conversation: Conversation) -> int:
        tools = len(renderer.encode(str([t.name for t in conversation.tools])))
        return tools + sum(length(said(m) if m.role == "assistant" else m.text) for m in conversation.messages)

    for blueprint, rng in blueprints(seed):
        shown = demonstrate(blueprint, rng, habits, count)
        executions, calls, passed = executions + 1, calls + shown.calls, passed + (shown.reward == 1.0)
        new = [sequence(history, renderer) for history in shown.histories]
        made += new
        total += sum(len(ids) for ids, _ in new)
        if total >= tokens:
            break
    sampled = sum(sum(mask) for _, mask in made)
    log.info(
        "%d executions, %.1f calls and %.0f sampled tokens each, %.1f %% pass; %d histories, %d tokens",
        *(executions, calls / executions, sampled / executions, 100 * passed / executions, len(made), total),
    )
    return made


def batches(data: list[Sequence], size: int, rng: Random) -> Iterator[Batch]:
    """(ids, kind), both (B, T) and right-padded, about ``size`` tokens; neighbours in length go together.

    ``kind`` is 1 for a sampled token, 0 for a prompt token, ``PADDING`` elsewhere.
    """
    order = sorted(range(len(data)), key=lambda i: (len(data[i][0]) + rng.randint(0, 32), i))
    groups: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, len(data[i][0]))
        if not groups or longest * (len(groups[-1]) + 1) > size:
            groups.append([])
            longest = len(data[i][0])
        groups[-1].append(i)
    rng.shuffle(groups)
    for group in groups:
        width = max(len(data[i][0]) for i in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        kind = torch.full((len(group), width), PADDING)
        for row, i in enumerate(group):
            tokens, sampled = data[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            kind[row, : len(tokens)] = torch.tensor(sampled)
        yield ids, kind


def curriculum(renderer: Renderer, seed: int, habits: Habits, *, tokens: int, epochs: int, size: int) -> list[Batch]:
    """Drills until copying is learned, then the demonstrations."""
    rng, functions = Random(f"drills/{seed}"), functions_of("train")
    drills = [drill(renderer, functions, rng, habits) for _ in range(DRILLS)]
    shown = sequences(renderer, seed, habits, tokens)
    plan = list(batches(drills, size, rng))
    for epoch in range(epochs):
        plan += batches(shown, size, Random(f"{seed}/{epoch}"))
    return plan


class Muon:
    """Orthogonalised momentum for weight matrices (Keller Jordan, 2024): learns to copy in a third of the steps.

    In float32, as bfloat16 products are slow on a CPU; five Newton-Schulz steps with the published coefficients.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.momenta = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(0.95).add_(parameter.grad)
            x = parameter.grad + 0.95 * momentum
            tall = x.shape[0] > x.shape[1]
            x = (x.T if tall else x) / (x.norm() + 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - 0.01 * rate).add_(x.T if tall else x, alpha=-rate * scale)
            parameter.grad = None


def fit(model: Qwen3ForCausalLM, plan: list[Batch], *, rate: float) -> float:
    """Train on the batches in order, with warm-up and cosine decay. Returns the final mean loss of replies, nats."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    losses, started = [], time.perf_counter()
    for step, (ids, kind) in enumerate(plan):
        cosine = 0.5 * (1 + math.cos(math.pi * step / len(plan)))
        now = min((step + 1) / WARMUP, max(cosine, 0.02))
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # right padding: causality hides it
        kept = kind[:, 1:] >= int(2 * step > len(plan))  # from half-way on the assistant's tokens alone
        nats = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
        sampled = kind[:, 1:][kept] == 1
        weights = torch.where(sampled, 1.0, PROMPT_WEIGHT)
        loss = (nats * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(MUON_RATE * now)
        adam.param_groups[0]["lr"] = rate * now
        adam.step()
        adam.zero_grad()
        losses.append(nats.detach()[sampled].mean().item())
        if step % 100 == 0 or step == len(plan) - 1:
            recent = sum(losses[-50:]) / len(losses[-50:])
            log.info("step %d/%d loss %.4f, %.0f s", step, len(plan), recent, time.perf_counter() - started)
    tail = losses[-max(1, len(losses) // 20) :]
    return sum(tail) / len(tail)


def make(out: Path, *, seed: int, tokens: int, epochs: int, batch: int, rate: float) -> None:
    """Write the policy folder."""
    torch.manual_seed(seed)
    habits = Habits()
    tokenizer.train(corpus(seed, habits), out)
    model_config = config()
    model_config.save_pretrained(out)
    renderer = Renderer.load(out)
    plan = curriculum(renderer, seed, habits, tokens=tokens, epochs=epochs, size=batch)
    model = Qwen3ForCausalLM(model_config)
    log.info("%d parameters, %d steps", sum(p.numel() for p in model.parameters()), len(plan))
    loss = fit(model, plan, rate=rate)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written through a private temporary file
    log.info("done, loss %.4f", loss)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the quickstart policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=800_000, help="tokens of demonstrations")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a batch")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate of embeddings and norms")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the time above is for one core
    make(args.out, seed=args.seed, tokens=args.tokens, epochs=args.epochs, batch=args.batch, rate=args.rate)


if __name__ == "__main__":
    main()
