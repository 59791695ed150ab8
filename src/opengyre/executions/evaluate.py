"""Scores what an execution left behind, after everything it started is dead.

The evaluator runs in a fresh sandbox of its own, in the folder of its own files, on a copy of the workspace (at the
path the agent knew, where the sandbox has fixed paths). The reward is read from a file in a folder that did not exist
while the agent lived, once no process is left; never from output, an exit code, or anything the agent wrote. No valid
reward is an EvaluatorError, never a number.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from opengyre.errors import EvaluatorError, OpenGyreError
from opengyre.executions.harness.base import Launch
from opengyre.executions.sandbox.base import Exit, Sandbox
from opengyre.executions.task import Task

REWARD_BYTES = 1 << 20  # a reward with its checks takes kilobytes; more is garbage that must not fill our memory
REWARD_NAMES = ("reward.json", "reward.txt")  # what an agent would write to be taken for an evaluator
CLEANUP_S = 10.0  # the evaluator's own folders are small

# $1: the agent's workspace, $2: where the evaluator finds it, $3: the evaluator's files, the rest: its argv. Sockets,
# sparse giants and links are copied as what they are. What cannot be copied is linked: no trick in it avoids the score.
COPY = """
timeout 60 cp -a --sparse=always --reflink=auto "$1/." "$2/" || {
    find "$2" -mindepth 1 -delete
    ln -s "$1"/* "$1"/.[!.]* "$2/"
} 2>/dev/null
cd "$3" && shift 3 && exec "$@"
"""


class Evaluation(msgspec.Struct, frozen=True):
    """A reward within the task's range, the checks it is made of, the evaluator's last output lines, and whether the
    agent touched what is scored by (it gains nothing by it: the evaluator has its own copy)."""

    reward: float
    checks: dict[str, float]
    detail: str
    tampered: bool


class _Verdict(msgspec.Struct, frozen=True):
    """The reward file: ``{"reward": 0.5, "checks": {"name": 1.0}}``; other keys are the evaluator's own."""

    reward: float
    checks: dict[str, float] = {}


async def evaluate(
    task: Task,
    workspace: Path,
    *,
    make: Callable[[str], Sandbox],
    execution_id: str,
    log: Path,
    deadline_s: float,
    retries: int,
) -> Evaluation:
    """The evaluator's verdict on ``workspace``.

    Args:
        make: makes a fresh sandbox under an id.
        execution_id: whose workspace it is; the sandboxes' ids derive from it.
        log: where the evaluator's output goes.
        deadline_s: seconds for each try.
        retries: further tries after a failed one.

    Raises:
        EvaluatorError: no try gave a finite reward within the task's range.
    """
    tampered = await asyncio.to_thread(was_tampered, task, workspace)
    for attempt in range(retries + 1):
        try:
            sandbox = make(f"{execution_id}-score-{attempt}")
            try:
                verdict, detail = await _try(task, workspace, sandbox, log, deadline_s)
                return Evaluation(verdict.reward, verdict.checks, detail, tampered)
            finally:
                await sandbox.close(CLEANUP_S)
        except (OpenGyreError, OSError) as cause:
            if attempt == retries:
                if isinstance(cause, EvaluatorError):
                    raise
                raise EvaluatorError(str(cause), where=f"task {task.task_id}") from cause
    raise AssertionError("unreachable")


async def _try(task: Task, workspace: Path, sandbox: Sandbox, log: Path, deadline_s: float) -> tuple[_Verdict, str]:
    files, rewards = sandbox.home / "evaluator", sandbox.home / "reward"
    for folder in (files, rewards):
        folder.mkdir()
    write_files(files, task.evaluator_files)
    inner = {
        "{workspace}": str(sandbox.inner(sandbox.workspace)),
        "{task}": str(sandbox.inner(files)),
        "{reward}": str(sandbox.inner(rewards) / "reward.json"),
    }
    argv = ["sh", "-c", COPY, "evaluator", str(workspace), inner["{workspace}"], inner["{task}"]]
    for word in task.evaluator:
        for name, value in inner.items():
            word = word.replace(name, value)
        argv.append(word)
    # The evaluator runs where its own files are, and what the agent wrote is not on its import path.
    env = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", **task.env}
    end = await sandbox.run(Launch(argv, env, tools=[str(workspace)]), timeout_s=deadline_s, log=log)
    return read_reward(rewards / "reward.json", task, end, deadline_s), end.tail


def read_reward(path: Path, task: Task, end: Exit, deadline_s: float) -> _Verdict:
    """The verdict in ``path``. A valid one counts however the evaluator ended. Raises EvaluatorError otherwise."""
    where = f"task {task.task_id}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a link or a FIFO is not a reward
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise EvaluatorError("the reward is not a file", where=where)
            data = file.read(REWARD_BYTES)
        verdict = msgspec.json.decode(data, type=_Verdict)
    except OSError as cause:
        how = f"overran its {deadline_s:g} s" if end.timed_out else f"exit code {end.code}"
        raise EvaluatorError(f"the evaluator wrote no reward ({how}): {end.tail[-500:]}", where=where) from cause
    except msgspec.DecodeError as cause:
        raise EvaluatorError(f"unreadable reward {data[:80]!r}: {cause}", where=where) from cause
    low, high = task.reward_range
    if not low <= verdict.reward <= high:
        raise EvaluatorError(f"reward {verdict.reward}", where=where, right=f"within [{low:g}, {high:g}]")
    return verdict


def was_tampered(task: Task, workspace: Path) -> bool:
    """True if the agent changed a file the evaluator has its own copy of, or left something named like a reward."""
    for path, content in task.files.items():
        if path in task.evaluator_files:
            try:
                if (workspace / path).read_text() != content:
                    return True
            except (OSError, UnicodeDecodeError):
                return True
    found = [workspace / name for name in REWARD_NAMES]
    try:
        found += [folder / name for folder in workspace.iterdir() for name in REWARD_NAMES]
    except OSError:
        return False  # no workspace left, or one that locks us out: nothing to be taken for a reward
    return any(os.path.lexists(path) and str(path.relative_to(workspace)) not in task.files for path in found)


def write_files(folder: Path, files: dict[str, str], executables: list[str] | None = None) -> None:
    """Write relative path -> content below ``folder``."""
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        if executables and path in executables:
            target.chmod(0o755)
