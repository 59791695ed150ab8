"""The command line: parse, call, turn errors into one line. All work is done elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opengyre import __version__
from opengyre.errors import ConfigError, OpenGyreError

PACED_SPEED = 60.0  # an hour in a minute: what a harness can keep up with
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130  # 130: as shells report SIGINT


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are one line on stderr, a traceback only with --debug."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing to say, nobody to say it to
        return EXIT_FAILED
    except OpenGyreError as error:
        if args.debug:
            raise
        print(f"opengyre: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except OSError as error:
        if args.debug:
            raise
        print(f"opengyre: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="opengyre", description="Elastic reinforcement learning for LLM agents.")
    parser.add_argument("--version", action="version", version=f"opengyre {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", parents=[common], help="run a training run")
    train.add_argument("config", help="a TOML file, a run folder (with --resume), or quickstart")
    train.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a config key")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the resolved config, stop")
    train.add_argument(
        "--paced",
        nargs="?",
        type=float,
        const=PACED_SPEED,
        metavar="SPEED",
        help=f"dry run: cells take their time from a cost model, SPEED (default {PACED_SPEED:g}) times as fast",
    )
    train.add_argument("--resume", action="store_true", help="go on with the run in run_dir")
    train.set_defaults(run=_train)

    tree = commands.add_parser("tree", parents=[common], help="draw the trajectory tree of an execution")
    tree.add_argument("run_dir", type=Path)
    tree.add_argument("execution", nargs="?", help="execution id; without it, the executions are listed")
    tree.set_defaults(run=_tree)

    replay = commands.add_parser("replay", parents=[common], help="rebuild every path and check it against the record")
    replay.add_argument("run_dir", type=Path)
    replay.add_argument("execution", nargs="?", help="execution id; without it, all executions")
    replay.set_defaults(run=_replay)

    report = commands.add_parser("report", parents=[common], help="write the HTML report of a run folder anew")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)

    from opengyre.executions import command as harness
    from opengyre.export import command as export
    from opengyre.proxy import command as proxy
    from opengyre.run import command as collect
    from opengyre.simulate import command as simulate
    from opengyre.training import command as sft

    collect.add_parser(commands, common)
    sft.add_parser(commands, common)
    export.add_parser(commands, common)
    proxy.add_parser(commands, common)
    harness.add_parser(commands, common)
    simulate.add_parser(commands, common)
    return parser


def _train(args: argparse.Namespace) -> int:
    from opengyre.config import to_toml
    from opengyre.quickstart import CONFIG_FILE
    from opengyre.run.preflight import prepare_file
    from opengyre.run.train import train

    path = CONFIG_FILE if args.config == "quickstart" else Path(args.config)
    overrides: list[str] = args.set + ([] if args.paced is None else [f"paced.speed={args.paced}"])
    prepared = prepare_file(path, overrides, resume=args.resume)
    if args.dry_run:
        print(to_toml(prepared.config), end="")
        print(f"\n# run folder: {prepared.run_dir}\n# model: {prepared.model_dir}")
        print(f"# tasks: {len(prepared.train)} to train on, {len(prepared.held_out)} held out")
        return 0
    summary = train(prepared, sys.stdout)
    print(f"run folder: {prepared.run_dir}")
    if prepared.config.watch.report:
        print(f"report:     {prepared.run_dir / 'report.html'}")
    if summary.before and summary.after and summary.before["pass_rate"] is not None:
        print(f"held-out pass rate: {summary.before['pass_rate']:.1%} -> {summary.after['pass_rate']:.1%}")
    return 0


def _tree(args: argparse.Namespace) -> int:
    from opengyre.run.inspect import draw_execution, list_executions

    print(draw_execution(args.run_dir, args.execution) if args.execution else list_executions(args.run_dir))
    return 0


def _replay(args: argparse.Namespace) -> int:
    from opengyre.run.inspect import replay

    checked, differences = replay(args.run_dir, args.execution)
    for line in differences:
        print(line)
    print(
        f"{checked.executions} executions, {checked.calls} calls, {checked.paths} paths, {checked.tokens} tokens: ",
        end="",
    )
    print("every path rebuilds" if not differences else f"{len(differences)} differences")
    return EXIT_FAILED if differences else 0


def _report(args: argparse.Namespace) -> int:
    from opengyre.run.preflight import load_run
    from opengyre.watch.report import write_report

    load_run(args.run_dir)
    print(write_report(args.run_dir))
    return 0
