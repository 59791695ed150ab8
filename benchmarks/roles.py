"""Precision of roles on recorded sessions: what the rules say of each leaf against what its script knows.

    python benchmarks/roles.py            plays the client tests of all installed harnesses, then reports (minutes)
    python benchmarks/roles.py FOLDER     reports on sessions kept before (OPENGYRE_KEEP_SESSIONS=FOLDER ./test)

Printed per harness and role, for the harness's own rule and, as its baseline in the same run, for the structural rule
that any unknown harness gets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from opengyre.record import roles as rules
from opengyre.record.store import Store
from opengyre.record.types import Role

ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[str, str]  # (what the script knows, what the rule says)


def sessions(folder: Path, kind: str) -> Iterator[tuple[Store, dict[str, str]]]:
    """The records of a harness's sessions, each with the roles its script told, by call id."""
    for place in sorted((folder / kind).iterdir()):
        with Store.open(place / "calls.db", readonly=True) as store:
            yield store, json.loads((place / "roles.json").read_text())


def judged(folder: Path, kind: str) -> Counter[Pair]:
    """(truth, said) of each leaf whose truth was told, under the rules as they are."""
    pairs: Counter[Pair] = Counter()
    for store, told in sessions(folder, kind):
        for execution in store.executions():
            tree = store.load_tree(execution.execution_id)
            for leaf, role in rules.assign_roles(tree).items():
                truth = told.get(tree.call_of(leaf).meta.call_id)
                if truth is not None:
                    pairs[truth, role.value] += 1
    return pairs


def share(pairs: Counter[Pair], role: str, side: int) -> str:
    """Precision (side 1: of what the rule called ``role``) or recall (side 0: of what was it)."""
    right, whole = pairs[role, role], sum(n for pair, n in pairs.items() if pair[side] == role)
    return f"{right / whole:9.1%}" if whole else f"{'-':>9}"


def report(folder: Path) -> bool:
    """Print the table; True if every harness's own rule is right about every leaf."""
    right = True
    columns = f"{'leaves':>6} {'right':>6} {'precision':>9} {'recall':>9}   {'generic rule':>19}"
    print(f"{'harness':<16} {'role':<18} {columns}")
    for kind in sorted(p.name for p in folder.iterdir() if p.is_dir()):
        own = judged(folder, kind)
        with patch.object(rules, "FAMILIES", {"": rules.generic}):
            generic = judged(folder, kind)
        for role in Role:
            leaves = sum(n for (truth, _), n in own.items() if truth == role)
            row = [share(own, role, 1), share(own, role, 0), share(generic, role, 1), share(generic, role, 0)]
            counts = f"{leaves:>6} {own[role.value, role.value]:>6}"
            print(f"{kind:<16} {role.value:<18} {counts} {row[0]} {row[1]}   {row[2]} {row[3]}")
        right &= all(truth == said for truth, said in own)
    return right


def play(folder: Path) -> None:
    """Run the client tests, keeping their sessions."""
    tests = sorted(str(p) for p in (ROOT / "tests" / "integration").glob("test_client_*.py"))
    env = os.environ | {"OPENGYRE_KEEP_SESSIONS": str(folder)}
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *tests], env=env, cwd=ROOT)


def main() -> int:
    """Play if need be, report."""
    parser = argparse.ArgumentParser(description="precision of roles on recorded sessions")
    parser.add_argument("folder", nargs="?", type=Path)
    folder = parser.parse_args().folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="opengyre-sessions-"))
        play(folder)
        print(f"sessions: {folder}")
    return 0 if report(folder) else 1


if __name__ == "__main__":
    sys.exit(main())
