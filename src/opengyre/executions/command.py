"""``opengyre harness`` on the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from opengyre.executions.harness.install import DEFAULT_DIR, PINNED


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command and its two verbs."""
    parser = commands.add_parser("harness", help="install the pinned agent harnesses, or list them")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    install = verbs.add_parser(
        "install",
        parents=[common],
        help="install pinned harnesses from npm or PyPI; no install script of theirs is run",
    )
    install.add_argument("names", nargs="+", choices=[*PINNED, "all"], metavar="NAME", help=", ".join([*PINNED, "all"]))
    install.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"where (default {DEFAULT_DIR})")
    install.set_defaults(run=_install)
    listing = verbs.add_parser("list", parents=[common], help="which harnesses there are, and where they were found")
    listing.set_defaults(run=_list)


def _install(args: argparse.Namespace) -> int:
    from opengyre.executions.harness.install import VARIABLE, folders, install

    for name in PINNED if "all" in args.names else dict.fromkeys(args.names):
        sys.stdout.write(f"{name} {PINNED[name].version}: ")
        sys.stdout.flush()
        sys.stdout.write(f"{install(name, args.dir)}\n")
    place = args.dir.expanduser().absolute()
    if place not in folders():
        sys.stdout.write(f"to be found there: export {VARIABLE}={place}\n")
    return 0


def _list(_: argparse.Namespace) -> int:
    from opengyre.executions.harness.install import find, version_of

    for name, pin in PINNED.items():
        program = find(name)
        if program is None:
            state = "not installed"
        else:
            version = version_of(pin, program) or "does not say its version"
            state = str(program) if pin.version in version.split() else f"{program} is {version}: not supported"
        sys.stdout.write(f"{name:<16} {pin.version:<10} {state}\n")
    return 0
