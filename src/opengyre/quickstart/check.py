"""Run the examples of the requirements and say, a line per function, whether it behaves.

Usage: ./check [MODULE...]. Like a real build it takes its time, now and then a lot of it.
"""

# ruff: noqa: PTH109, PTH113, PTH123
# (pathlib and contextlib would double the time this script takes to start)
from __future__ import annotations

import os
import random
import sys
import time

TYPE_CHECKING = False  # importing typing would cost more than all the rest
if TYPE_CHECKING:
    from typing import Any

    Cases = dict[str, dict[str, list[list[Any]]]]

CASES: Cases = {}  # filled in per task: module -> function -> [[input, expected], ...]
SEED, MEDIAN_S, SIGMA = "", 0.0, 0.0  # filled in per task: of the time a run takes, log-normal


def verdict(source: str, signature: str, cases: list[list[Any]]) -> bool:
    """True if ``source`` defines a function that meets every case."""
    namespace: dict[str, Any] = {}
    try:
        exec(source, namespace)
        function = namespace[signature.partition("(")[0]]
        return all(bool(function(value) == expected) for value, expected in cases)
    except Exception:  # noqa: BLE001 - whatever the code under test raises, it does not behave
        return False


def report(sources: dict[str, str], cases: Cases) -> str:
    """Lines ``name(x) ok`` or ``name(x) FAIL`` for each function of ``cases``, given module -> source."""
    lines = []
    for module, functions in cases.items():
        for signature, examples in functions.items():
            good = verdict(sources.get(module, ""), signature, examples)
            lines.append(signature + (" ok\n" if good else " FAIL\n"))
    return "".join(lines)


def wait_s() -> float:
    """Seconds this run takes: the same for the n-th run of one execution of one task, whatever the machine."""
    execution = os.environ.get("ANTHROPIC_BASE_URL", "").partition("://")[2].partition("/")[2] or os.getcwd()
    with open(".check-runs", "ab") as runs:
        runs.write(b".")
        count = runs.tell()
    return MEDIAN_S * random.Random(f"{SEED}/{execution}/{count}").lognormvariate(0.0, SIGMA)


def main() -> None:
    """Wait, run, report."""
    time.sleep(wait_s())
    asked = sys.argv[1:]
    cases = {module: functions for module, functions in CASES.items() if not asked or module in asked}
    sources = {}
    for module in cases:
        if os.path.isfile(module):
            with open(module, encoding="utf-8", errors="replace") as file:
                sources[module] = file.read()
    sys.stdout.write(report(sources, cases) or "no such module\n")


if __name__ == "__main__":
    main()
