"""Make what the example starts from: ``python examples/claude_code/make.py`` (one core, a few minutes).

    shown/ (tasks) ─▶ boot/ (a few executions of Claude Code, bytes for tokens) ─▶ tokenizer ─▶ drills ─▶ base/

``base/`` is a policy that can copy a file's name into a command and has never seen a conversation: what an agent does
it learns from recorded demonstrations (``opengyre collect``, ``opengyre sft``) and then by itself (``opengyre train``).
The same seed gives the same folder on the same machine.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import chores
import demonstrator
import tokenizer
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from opengyre.config import load
from opengyre.proxy.render import Renderer
from opengyre.quickstart.make_policy import Sequence, batches, fit
from opengyre.record.store import Store
from opengyre.run.collect import collect
from opengyre.run.preflight import prepare

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
SHOWN = 400  # tasks to be demonstrated; an execution of Claude Code costs a second of a core
BOOT_TASKS = 24  # executions the tokenizer is trained on; each chore's command is among them several times
BYTES_CONTEXT = 200_000  # of the tokenizer of bytes: a prompt with Claude Code's whole tool set has 90,000
REPEAT = 4  # of what is said in the tokenizer's corpus: it comes before the constant prompt
DRILL_BATCH = 1024  # tokens


def record(
    out: Path, config: Path, overrides: list[str], *, signatures: bool = False, limit: int = BOOT_TASKS
) -> tuple[set[str], list[str]]:
    """A few executions of Claude Code with the demonstrator on bytes for tokens; see ``texts_of``."""
    model, run_dir = out / "bytes", out / "boot"
    tokenizer.write(model, [], tokenizer.BYTES, BYTES_CONTEXT, signatures=signatures)
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [f"model.path='{model}'", f"model.context={BYTES_CONTEXT}", f"run_dir='{run_dir}'", *overrides]
    prepared = prepare(
        load(config, ["tasks.kind=folder", f"tasks.path='{out / 'shown'}'", *settings]), run_dir, resume=False
    )
    engine = f"{HERE / 'demonstrator.py'}:engine"
    collect(prepared, executions=1, engine=engine, split="train", limit=limit, say=log.info)
    return texts_of(run_dir, prepared.renderer)


def texts_of(run_dir: Path, renderer: Renderer) -> tuple[set[str], list[str]]:
    """(what stands before the first reply, the rest) of recorded executions, as texts cut at markers."""
    heads, rest = set[str](), list[str]()
    with Store.open(run_dir / "calls.db", readonly=True) as store:
        for execution in store.executions():
            tree = store.load_tree(execution.execution_id)
            for leaf in tree.leaves():
                text = bytes_text(renderer, tree.rebuild(leaf).ids.tolist())
                head, role, tail = text.partition("assistant\n")
                heads.update(pieces(head))
                rest += pieces(role + tail)
    return heads, rest


def pieces(text: str) -> list[str]:
    """``text`` without its markers."""
    return [piece for piece in re.split("|".join(map(re.escape, tokenizer.CUTS)), text) if piece]


def bytes_text(renderer: Renderer, ids: list[int]) -> str:
    """The text of recorded ids, cut where a turn ends."""
    (stop,) = renderer.stop_token_ids
    turns, start = [], 0
    for place in [i for i, token in enumerate(ids) if token == stop] + [len(ids)]:
        turns.append(renderer.decode(ids[start:place]).lstrip("\n"))
        start = place + 1
    return tokenizer.STOP.join(turns)


def listing(lines: list[str]) -> str:
    """A file as the reading tool shows it."""
    return "".join(f"{n}\t{line}\n" for n, line in enumerate(lines, 1)) + f"{len(lines) + 1}\t"


def drills(renderer: Renderer, count: int, seed: int) -> Iterator[Sequence]:
    """Chores and the call that does them, without a conversation around them: copying is learned from these first."""
    rng, pairs = Random(f"drills/{seed}"), chores.pairs("train")
    for _ in range(count):
        todo = [
            chores.Chore(label, kind, subject)
            for label, (kind, subject) in zip(chores.LABELS, rng.sample(pairs, 3), strict=True)
        ]
        asked = listing([c.line for c in todo])
        answer = demonstrator.call("Bash", command="\n".join(c.command(right=rng.random() < 0.5) for c in todo))
        if rng.random() < chores.CONF_SHARE:
            old = {key: rng.randint(10, 99) for key in rng.sample(chores.KEYS, len(chores.KEYS))}
            key, value = rng.choice(chores.KEYS), rng.randint(10, 99)
            asked = listing([chores.Chore(rng.choice(chores.LABELS), "set", key, value).line])
            asked += "\n" + listing([f"{k}={v}" for k, v in old.items()])
            strings = {"old_string": f"{key}={old[key]}", "new_string": f"{key}={value}"}
            answer = demonstrator.call("Edit", file_path="conf", **strings)
        prompt, reply = renderer.encode(asked), renderer.encode(answer)
        yield prompt + reply, [False] * len(prompt) + [True] * len(reply)


def config(vocabulary: int, context: int) -> Qwen3Config:
    """Half a million parameters in two layers, the fewest that can look something up and copy it."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def make(args: argparse.Namespace) -> None:
    """Write ``out/{shown,bytes,boot,base}``."""
    out: Path = args.out
    shutil.rmtree(out / "shown", ignore_errors=True)
    chores.write_tasks(out / "shown", train=SHOWN, held_out=0, seed=args.seed + 1)
    base = out / "base"
    heads, rest = record(out, args.config, args.set)
    tokenizer.write(base, sorted(heads) + REPEAT * rest, args.vocabulary, args.context)
    torch.manual_seed(args.seed)
    settings = config(args.vocabulary, args.context)
    settings.save_pretrained(base)
    data = list(drills(Renderer.load(base), args.drills, args.seed))
    model = Qwen3ForCausalLM(settings)
    log.info(
        "%d parameters, %d tokens of drills", sum(p.numel() for p in model.parameters()), sum(len(i) for i, _ in data)
    )
    loss = fit(model, list(batches(data, DRILL_BATCH, Random(args.seed))), rate=4e-3)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0)  # type: ignore[no-untyped-call]
    model.save_pretrained(base)
    log.info("%s, loss %.4f", base, loss)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/claude-code"), help="folder to write")
    parser.add_argument("--config", type=Path, default=HERE / "bare.toml", help="the run it is for: its harness")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a config key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=1536)
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--drills", type=int, default=6000)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    make(args)


if __name__ == "__main__":
    main()
