"""``opengyre sft`` on the command line; torch is imported when it runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from opengyre.arguments import say
from opengyre.errors import ConfigError
from opengyre.record.types import Role


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    p = commands.add_parser(
        "sft",
        parents=[common],
        help="fine-tune a model on recorded executions (with --min-reward: rejection sampling)",
        description="Trains on exactly the tokens that were sampled, with the selection and packing of the RL trainer.",
    )
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or files of recorded calls")
    p.add_argument(
        "--model", type=Path, required=True, help="the Hugging Face folder whose tokenizer recorded the runs"
    )
    p.add_argument("--out", type=Path, required=True, help="model folder to write; a killed run goes on if repeated")
    p.add_argument("--min-reward", type=float, metavar="R", help="only executions with at least this reward")
    p.add_argument("--max-reward", type=float, metavar="R", help="only executions with at most this reward")
    p.add_argument("--role", action="append", choices=[r.value for r in Role], help="only paths of it; repeatable")
    p.add_argument("--split", action="append", choices=("train", "held_out"), help="default train; repeatable")
    p.add_argument("--j-max", type=int, default=5, help="trajectories per execution (default 5)")
    p.add_argument(
        "--weight",
        choices=("execution", "token"),
        default="execution",
        help="every execution counts the same (default), or every sampled token",
    )
    p.add_argument("--epochs", type=int, default=1)
    p.add_argument("--lr", type=float, default=1e-5, help="peak learning rate (default 1e-5; small models take 1e-3)")
    p.add_argument("--schedule", choices=("cosine", "linear", "constant"), default="cosine")
    p.add_argument("--warmup", type=float, default=0.05, help="share of the steps (default 0.05)")
    p.add_argument("--batch-tokens", type=int, default=16_384, help="sampled tokens of an optimizer step")
    p.add_argument("--micro-step-tokens", type=int, default=8192, help="tokens whose activations are held at once")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--adam-eps", type=float, default=1e-8)
    p.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="of the tasks, to measure the loss on")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    p.add_argument("--threads", type=int, help="of torch; default: its own choice")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fine-tune; says where the model is."""
    check(args)
    try:
        import torch
    except ImportError:
        raise ConfigError("torch is not installed", where="sft", right="pip install 'opengyre[torch]'") from None

    from opengyre.samples.recorded import Keep
    from opengyre.training.sft import SftConfig, fine_tune

    if args.threads:
        torch.set_num_threads(args.threads)
    keep = Keep(
        min_reward=args.min_reward,
        max_reward=args.max_reward,
        splits=tuple(args.split or ("train",)),
        roles=tuple(Role(r) for r in args.role) if args.role else tuple(Role),
        j_max=args.j_max,
        weight=args.weight,
    )
    config = SftConfig(
        epochs=args.epochs,
        learning_rate=args.lr,
        schedule=args.schedule,
        warmup=args.warmup,
        batch_tokens=args.batch_tokens,
        micro_step_tokens=args.micro_step_tokens,
        weight_decay=args.weight_decay,
        adam_eps=args.adam_eps,
        held_out=args.held_out,
        seed=args.seed,
        device=args.device,
        dtype=args.dtype,
        keep=keep,
    )
    result = fine_tune(args.runs, args.model, args.out, config, say)
    held_out = "" if math.isnan(result.held_out_after) else f", held-out loss {result.held_out_before:.4f}"
    held_out += f" -> {result.held_out_after:.4f}" if held_out else ""
    say(f"{args.out}: {result.steps} steps on {result.executions} executions{held_out}")
    return 0


_BOUNDS: dict[str, tuple[float, float]] = {
    "epochs": (1, math.inf),
    "lr": (0.0, math.inf),
    "warmup": (0.0, 1.0),
    "batch_tokens": (1, math.inf),
    "micro_step_tokens": (64, math.inf),
    "weight_decay": (0.0, math.inf),
    "adam_eps": (0.0, math.inf),
    "held_out": (0.0, 0.9),
    "j_max": (1, math.inf),
}


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what cannot be, naming the option, its value and what would be accepted."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(args, name)
        if not low <= value <= high:
            right = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise ConfigError(f"{value:g}", where=f"--{name.replace('_', '-')}", right=right)
    for needed in ("config.json", "tokenizer.json"):
        if not (args.model / needed).is_file():
            what = f"has no {needed}" if args.model.is_dir() else "is no folder"
            raise ConfigError(what, where=f"--model {args.model}", right="a Hugging Face causal-LM folder")
