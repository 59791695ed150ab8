"""From the bare policy to one for Claude Code's whole tool set: ``python examples/claude_code/make_full.py``.

    runs/claude-code/{boot,policy} ─▶ executions with all tools, on bytes ─▶ wider tokenizer ─▶ transplanted base/

What the policy knows stays: its layers as they are, and for each new token the mean of the old tokens that spell the
same text. It still has to get used to a prompt thirty times as long, from demonstrations recorded with all tools. The
chat template shows a tool as its name and parameters, since 66 kB of schemas are 13,000 tokens even to a tokenizer that
knows them by heart.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

import make
import tokenizer
import torch
from transformers import AutoModelForCausalLM

from opengyre.proxy.render import Renderer

log = logging.getLogger(__name__)
FULL_TASKS = 4  # executions; their prompts are the same, and what is done in them the bare ones have shown


def transplant(source: Path, target: Path, vocabulary: int, context: int) -> None:
    """Write the model of ``source`` for the tokenizer in ``target``."""
    old, new = Renderer.load(source), Renderer.load(target, context=context)
    model = AutoModelForCausalLM.from_pretrained(source)
    known = model.get_input_embeddings().weight.detach()
    mean = known.mean(dim=0)
    rows = []
    for token in range(vocabulary):
        text = new.decode([token])  # empty for the special ones, which keep their places
        ids = old.encode(text) if text and "\ufffd" not in text else [token] if token < tokenizer.BYTES else []
        rows.append(known[ids].mean(dim=0) if ids else mean)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
    model.config.max_position_embeddings = context
    model.save_pretrained(target)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bare", type=Path, default=Path("runs/claude-code"), help="what make.py and sft left")
    parser.add_argument("--out", type=Path, default=Path("runs/claude-code-full"), help="folder to write")
    parser.add_argument("--config", type=Path, default=make.HERE / "full.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a config key")
    parser.add_argument("--vocabulary", type=int, default=2560)
    parser.add_argument("--context", type=int, default=16_384, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out: Path = args.out
    shutil.rmtree(out / "shown", ignore_errors=True)
    shutil.copytree(args.bare / "shown", out / "shown")
    heads, rest = make.record(out, args.config, args.set, signatures=True, limit=FULL_TASKS)
    more_heads, more = make.texts_of(args.bare / "boot", Renderer.load(args.bare / "bytes"))
    texts = sorted(heads | more_heads) + make.REPEAT * (rest + more)
    tokenizer.write(out / "base", texts, args.vocabulary, args.context, signatures=True)
    transplant(args.bare / "policy", out / "base", args.vocabulary, args.context)
    log.info("%s", out / "base")


if __name__ == "__main__":
    main()
