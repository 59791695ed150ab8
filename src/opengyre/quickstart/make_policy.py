"""Make the shipped policy: ``python -m opengyre.quickstart.make_policy --out DIR`` (one core, about ten minutes).

    demonstrations -> tokenizer -> the same demonstrations, tokenised -> next-token training on assistant turns -> DIR

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
from opengyre.quickstart.demonstrations import demonstrate, said, sequence
from opengyre.quickstart.demonstrator import Habits
from opengyre.quickstart.tasks import Blueprint, draw, functions_of

log = logging.getLogger(__name__)

BIG_SHARE = 0.4  # of demonstrations with a second module; more than in the tasks, as they show more kinds of turns
CORPUS = 600  # executions the tokenizer is trained on
PROMPT_WEIGHT = 0.3  # of a prompt token's loss in the first half of training: copying is learned from prompts too
PADDING = -1
Sequence = tuple[list[int], list[bool]]


def config() -> Qwen3Config:
    """About half a million parameters: two layers make an induction head, the third reads verdicts."""
    return Qwen3Config(
        vocab_size=tokenizer.VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
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
                if message.role in ("assistant", "tool"):
                    yield from (piece for piece in re.split(r"</?tool_call>", text) if piece)


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


def batches(data: list[Sequence], size: int, rng: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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


def fit(model: Qwen3ForCausalLM, data: list[Sequence], *, epochs: int, size: int, rate: float, seed: int) -> float:
    """AdamW with warm-up and cosine decay. Returns the mean loss of sampled tokens over the last tenth, nats."""
    plan = [b for epoch in range(epochs) for b in batches(data, size, Random(f"{seed}/{epoch}"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    warmup, losses, started = max(1, len(plan) // 20), [], time.perf_counter()
    for step, (ids, kind) in enumerate(plan):
        cosine = 0.5 * (1 + math.cos(math.pi * step / len(plan)))
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / warmup, max(cosine, 0.02))
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # right padding: causality hides it
        kept = kind[:, 1:] >= int(2 * step > len(plan))  # from half-way on the assistant's tokens alone
        nats = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), ids[:, 1:][kept], reduction="none")
        sampled = kind[:, 1:][kept] == 1
        weights = torch.where(sampled, 1.0, PROMPT_WEIGHT)
        loss = (nats * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.detach()[sampled].mean().item())
        if step % 100 == 0 or step == len(plan) - 1:
            recent = sum(losses[-50:]) / len(losses[-50:])
            log.info("step %d/%d loss %.4f, %.0f s", step, len(plan), recent, time.perf_counter() - started)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def make(out: Path, *, seed: int, tokens: int, epochs: int, batch: int, rate: float) -> None:
    """Write the policy folder."""
    torch.manual_seed(seed)
    habits = Habits()
    tokenizer.train(corpus(seed, habits), out)
    model_config = config()
    model_config.save_pretrained(out)
    data = sequences(Renderer.load(out), seed, habits, tokens)
    model = Qwen3ForCausalLM(model_config)
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    loss = fit(model, data, epochs=epochs, size=batch, rate=rate, seed=seed)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0)  # type: ignore[no-untyped-call]
    model.save_pretrained(out)
    log.info("done, loss %.4f", loss)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the quickstart policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of demonstrations")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the time above is for one core
    make(args.out, seed=args.seed, tokens=args.tokens, epochs=args.epochs, batch=args.batch, rate=args.rate)


if __name__ == "__main__":
    main()
