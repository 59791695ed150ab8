"""``opengyre export`` on the command line."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from opengyre.arguments import positive

ROLES = ("main", "main_summary", "sub_agent", "sub_agent_summary")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export",
        parents=[common],
        help="write the token-level samples of recorded executions to a file",
        description="Token ids, loss masks, behaviour log-probabilities, versions, roles and rewards of what was"
        " recorded, for other trainers and tools. docs/export.md describes every column.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a folder made by opengyre train, collect or proxy")
    parser.add_argument("--format", choices=("jsonl", "parquet", "verl", "slime"), required=True)
    parser.add_argument("--out", type=Path, help="the file (default: samples.jsonl, samples.parquet, … in RUN)")
    parser.add_argument("--split", choices=("train", "held_out", "all"), default="train")
    parser.add_argument("--min-reward", type=_number, metavar="R", help="only executions with at least this reward")
    parser.add_argument("--unscored", action="store_true", help="executions without a reward too")
    parser.add_argument(
        "--select",
        choices=("j_max", "all"),
        default="j_max",
        help="j_max: as the run selects (default); all: every leaf that still has something to train",
    )
    parser.add_argument("--j-max", type=positive, metavar="J", help="trajectories per execution (default: the run's)")
    parser.add_argument("--seed", type=int, help="of the selection (default: the run's)")
    parser.add_argument(
        "--role", action="append", choices=ROLES, help="only leaves of this role; may be given several times"
    )
    parser.add_argument("--execution", action="append", default=[], metavar="ID", help="only this one; likewise")
    parser.add_argument("--messages", action="store_true", help="with the conversation, for people")
    parser.set_defaults(run=run)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: a finite number")
    return value


def run(args: argparse.Namespace) -> int:
    """Export; says what went into the file and what did not."""
    from opengyre.errors import ConfigError
    from opengyre.export.source import EVERY_LEAF, Choice, Counted, Source
    from opengyre.export.write import SUFFIX, open_writer
    from opengyre.record.types import Role

    if args.select == "all" and args.j_max is not None:
        raise ConfigError(f"{args.j_max} with --select all", where="--j-max", right="one of the two")
    choice = Choice(
        split=args.split,
        min_reward=args.min_reward,
        unscored=args.unscored,
        roles=tuple(Role(role) for role in args.role or ROLES),
        j_max=EVERY_LEAF if args.select == "all" else args.j_max,
        seed=args.seed,
        executions=tuple(args.execution),
        messages=args.messages,
    )
    counted = Counted()
    with Source(args.run_dir) as source:
        kind: str = args.format
        name = f"samples.{kind}{SUFFIX[kind]}" if kind in ("verl", "slime") else f"samples{SUFFIX[kind]}"
        path: Path = args.out or args.run_dir / name
        with open_writer(path, kind) as writer:
            for sample in source.samples(choice, counted):
                writer.write(sample)
            if not counted.samples:
                raise ConfigError("has nothing to train in what was chosen", where=str(args.run_dir))
    left_out = ", ".join(f"{n} {why}" for why, n in sorted(counted.left_out.items()) if n)
    sys.stdout.write(
        f"{counted.samples} samples of {counted.executions} executions, {counted.trained} of {counted.tokens} tokens"
        f" trained: {path}\n" + (f"left out: {left_out}\n" if left_out else "")
    )
    return 0
