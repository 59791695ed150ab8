"""Drills in place: ``python examples/claude_code/drill.py --model DIR --boot DIR --out DIR``.

    the opening that Claude Code really sent ─▶ an invented TODO.md ─▶ the demonstrator's call ─▶ (conf ─▶ its edit)

Four hundred recorded demonstrations teach what to do, but are too few to learn to copy any name to any place. These are
made up without end, stand behind the recorded opening as in an execution, and have other tokens for names and digits
half of the time. A fine-tuning on the recorded demonstrations comes after them.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import time
from pathlib import Path
from random import Random

import chores
import demonstrator
import numpy as np
import tokenizer
import torch
from make import BYTES_CONTEXT, bytes_text, listing
from transformers import AutoModelForCausalLM

from opengyre.proxy.render import Renderer
from opengyre.quickstart.make_policy import Muon
from opengyre.record.store import Store
from opengyre.record.types import Role
from opengyre.samples.types import Sample
from opengyre.training.checkpoint import TOKENIZER_FILES
from opengyre.training.forward import Forward

log = logging.getLogger(__name__)
PER_STEP = 40  # drills of a step; they share the opening, so it is computed once
RENAMED = 0.5  # of drills; with none, a policy learns which files go with which chore instead of copying
CONF = 0.6  # of drills that have a value to set: more than in the tasks, for digits are the hardest to copy
RIGHT = 0.55
WARMUP = 30  # steps
END = "<|im_end|>\n<|im_start|>assistant\n"


def opening(boot: Path) -> str:
    """What stands before the listing of TODO.md, as recorded on bytes."""
    renderer = Renderer.load(boot.parent / "bytes", context=BYTES_CONTEXT)
    with Store.open(boot / "calls.db", readonly=True) as store:
        tree = store.load_tree(store.executions()[0].execution_id)
        turns = bytes_text(renderer, tree.rebuild(tree.leaves()[0]).ids.tolist()).split("<|im_end|>")
    before = next(i for i, turn in enumerate(turns) if turn.startswith("tool\n"))
    return "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns[:before]) + "<|im_start|>tool\n"


class Drills:
    """An endless source of samples."""

    def __init__(self, renderer: Renderer, head: str, vocabulary: int, seed: int) -> None:
        self._renderer, self._rng, self._vocabulary = renderer, Random(f"in place/{seed}"), vocabulary
        self._head = renderer.encode(head)
        (self._stop,) = renderer.stop_token_ids
        words = (*chores.FILES, *chores.KEYS, *"0123456789")
        self._copied = [token for word in words for token in renderer.encode(word)]
        self._count = 0

    def sample(self) -> Sample:
        """The next one: trained on its replies alone."""
        rng, encode = self._rng, self._renderer.encode
        todo = chores.draw(rng, "train", CONF)
        ids, mask = list[int](), list[bool]()

        def add(text: str, *, reply: bool) -> None:
            new = [*encode(text), self._stop] if reply else encode(text)
            ids.extend(new)
            mask.extend([reply] * len(new))

        add(listing([c.line for c in todo]) + END, reply=False)
        work = demonstrator.work(todo, RIGHT, demonstrator.Dice(rng))
        add(work, reply=True)
        if setting := next((c for c in todo if c.kind == "set" and '"conf"' in work), None):
            old = {key: rng.randint(10, 99) for key in rng.sample(chores.KEYS, len(chores.KEYS))}
            conf = listing([f"{key}={value}" for key, value in old.items()])
            done = "\n<|im_start|>tool\n(Bash completed with no output)<|im_end|>\n<|im_start|>tool\n"
            add(done + conf + END, reply=False)
            add(demonstrator.edit(setting, str(old[setting.subject])), reply=True)
        new = renamed(self._copied, self._vocabulary, rng) if rng.random() < RENAMED else {}
        return self._made([new.get(i, i) for i in ids], mask)

    def _made(self, ids: list[int], mask: list[bool]) -> Sample:
        self._count += 1
        trained = np.array([False] * len(self._head) + mask)
        return Sample(
            sample_id=str(self._count),
            execution_id=str(self._count),
            query_id="",
            role=Role.MAIN,
            ids=np.array(self._head + ids, np.int32),
            mask=trained,
            logprobs=np.where(trained, 0.0, np.nan).astype(np.float32),
            advantage=1.0,
            weight=1.0,
            oldest_version=0,
            newest_version=0,
        )


def renamed(copied: list[int], vocabulary: int, rng: Random) -> dict[int, int]:
    """Other tokens for those that are copied: whoever cannot know the names by heart has to look them up."""
    return dict(zip(copied, rng.sample(range(tokenizer.FIRST, vocabulary), len(copied)), strict=True))


def train(model: torch.nn.Module, drills: Drills, steps: int, rate: float, muon_rate: float) -> None:
    """Cross-entropy of the replies; orthogonalised momentum for matrices, Adam for the rest."""
    forward = Forward(model.eval())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    losses, started = list[float](), time.perf_counter()
    for step in range(steps):
        now = min((step + 1) / WARMUP, max(0.5 * (1 + math.cos(math.pi * step / steps)), 0.02))
        (packed,) = forward.plan([drills.sample() for _ in range(PER_STEP)], 1 << 20)
        loss = -forward.logprobs(packed).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(muon_rate * now)
        adam.param_groups[0]["lr"] = rate * now
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            recent = sum(losses[-20:]) / len(losses[-20:])
            log.info("step %d/%d loss %.4f, %.0f s", step, steps, recent, time.perf_counter() - started)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the policy to go on from")
    parser.add_argument("--boot", type=Path, default=Path("runs/claude-code/boot"), help="recorded by make.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--muon-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    drills = Drills(Renderer.load(args.model), opening(args.boot), model.config.vocab_size, args.seed)
    train(model, drills, args.steps, args.rate, args.muon_rate)
    model.save_pretrained(args.out)
    for path in (path for pattern in TOKENIZER_FILES for path in args.model.glob(pattern)):
        shutil.copyfile(path, args.out / path.name)


if __name__ == "__main__":
    main()
