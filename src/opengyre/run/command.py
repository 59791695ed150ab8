"""``opengyre collect`` on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from opengyre.arguments import positive, say


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "collect",
        parents=[common],
        help="run tasks through a harness and score them, without training",
        description="Runs every task of a split and records calls and rewards in a run folder, for sft, tree, replay.",
    )
    parser.add_argument("config", help="a TOML file, or a run folder (with --resume)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a config key")
    parser.add_argument(
        "--engine",
        metavar="MODULE:FUNCTION",
        help="makes what answers the calls: called with (config, renderer), returns a rollout engine; MODULE may be a"
        " .py file; without it, the config's model on the config's cells",
    )
    parser.add_argument("--executions", type=positive, default=1, help="of each task (default 1)")
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument("--limit", type=positive, help="at most so many tasks")
    parser.add_argument("--resume", action="store_true", help="go on with the collection in run_dir")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collect; says what came of it."""
    from opengyre.run.collect import collect, describe
    from opengyre.run.preflight import prepare_file

    prepared = prepare_file(Path(args.config), args.set, resume=args.resume)
    collected = collect(
        prepared, executions=args.executions, engine=args.engine, split=args.split, limit=args.limit, say=say
    )
    say(describe(collected, f"run folder: {prepared.run_dir}"))
    return 0
