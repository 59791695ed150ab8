"""Score a workspace: the share of required functions that behave on inputs the agent never saw.

Usage: python -ISB evaluate.py WORKSPACE REWARD_FILE, with ``spec.json`` beside this file (module -> function -> cases).
Nothing in the workspace is trusted. A module runs in a child that is told inputs and never expected results, may not
write files or start processes, and has a time limit; what it prints goes nowhere. The comparison is made here.
"""

# ruff: noqa: PTH105, PTH100, PTH113, PTH114, PTH118, PTH120, PTH123, SIM105
# (pathlib and contextlib would double the time this script takes to start)
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

TYPE_CHECKING = False  # importing typing would cost more than all the rest
if TYPE_CHECKING:
    from typing import Any

LIMIT_S = 10.0  # per child; an honest module needs milliseconds of CPU, which a loaded machine may be slow to give
SOURCE_LIMIT = 65536  # characters of a module that are read

CHILD = """
import json, os, resource, sys
asked = json.loads(sys.stdin.read())
out = os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2): os.dup2(null, fd)
for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_AS, 1 << 30),
                     (resource.RLIMIT_CPU, 2), (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
def say(index, values):
    out.write(json.dumps([index, values]) + "\\n"); out.flush()
namespace = {"__name__": "solution"}
try: exec(compile(asked["source"], "solution", "exec"), namespace)
except BaseException: os._exit(0)
for index, name, inputs in asked["functions"]:
    say(index, "started")
    values = []
    try:
        for value in inputs: values.append(namespace[name](value))
        json.dumps(values)
    except BaseException: values = "raised"
    say(index, values)
os._exit(0)
"""


def run_child(source: str, functions: list[tuple[int, str, list[Any]]]) -> dict[int, Any]:
    """Results by index of ``functions`` (index, name, inputs), as far as the child came within its time."""
    child = subprocess.Popen(
        [sys.executable, "-ISBc", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(json.dumps({"source": source, "functions": functions}).encode(), LIMIT_S)
    except subprocess.TimeoutExpired:
        kill(child)
        output, _ = child.communicate()
    finally:
        kill(child)
    results: dict[int, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        try:
            index, values = json.loads(line)
            results[int(index)] = values
        except (ValueError, TypeError, OverflowError, RecursionError):
            break  # a child that was ended in the middle of a line, or a forger
    return results


def kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it may have started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if child.returncode is None and child.poll() is None:
        child.kill()


def score_module(source: str, functions: dict[str, list[list[Any]]]) -> dict[str, float]:
    """Function -> 1.0 or 0.0. A function that hangs costs itself, not the ones after it."""
    names = list(functions)
    pending = [(i, name.partition("(")[0], [value for value, _ in functions[name]]) for i, name in enumerate(names)]
    scores = dict.fromkeys(names, 0.0)
    while pending:
        due = {i for i, _, _ in pending}
        results = {i: values for i, values in run_child(source, pending).items() if i in due}
        if not results:
            break  # the module does not load, or says nothing true
        for i, values in results.items():
            scores[names[i]] = float(values == [expected for _, expected in functions[names[i]]])
        pending = [item for item in pending if item[0] not in results]
    return scores


def main(workspace: str, reward_file: str) -> None:
    """Write ``{"reward": float, "checks": {"module:function": float}}``."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    checks: dict[str, float] = {}
    for module, functions in spec.items():
        path, source = os.path.join(workspace, module), None
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                source = file.read(SOURCE_LIMIT)
        scores = score_module(source, functions) if source is not None else dict.fromkeys(functions, 0.0)
        checks.update({f"{module}:{name}": score for name, score in scores.items()})
    answer = json.dumps({"reward": sum(checks.values()) / len(checks), "checks": checks})
    partial = reward_file + ".partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(answer)
    os.replace(partial, reward_file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
