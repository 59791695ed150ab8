"""Scores the hello script: the share of cases that print what they should. Usage: check.py WORKSPACE REWARD"""

import json
import subprocess
import sys
from pathlib import Path

CASES = {"named": (["Ada"], "Hello, Ada!"), "alone": ([], "Hello, world!"), "blanks": (["  Ada "], "Hello, Ada!")}


def passes(workspace: Path, argv: list[str], expected: str) -> float:
    """1.0 if the script prints ``expected``; whatever it does instead, 0.0."""
    try:
        done = subprocess.run([workspace / "hello", *argv], capture_output=True, text=True, timeout=5)
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired):
        return 0.0
    return float(done.stdout.strip() == expected)


workspace, reward = map(Path, sys.argv[1:])
checks = {name: passes(workspace, *case) for name, case in CASES.items()}
reward.write_text(json.dumps({"reward": sum(checks.values()) / len(checks), "checks": checks}))
