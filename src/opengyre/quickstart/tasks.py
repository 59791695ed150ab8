"""The quickstart's tasks: write the little library that a requirements file asks for.

A task names 2 to 4 functions, each a behaviour with a name and a constant; a big one keeps half of them in a second
file, for a module that is best delegated. ``./check`` in the workspace runs examples and takes a log-normal time. The
evaluator has its own inputs. Every possible function belongs to one split, so no function of a held-out task is ever
asked for in training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from opengyre.errors import TaskError
from opengyre.executions.options import read_options
from opengyre.executions.task import Deadlines, Task
from opengyre.quickstart.behaviours import BEHAVIOURS, CONSTANTS, NAMES, Function

SPLITS = ("train", "held_out")
INSTRUCTION = "Write the library of SPEC.md. Test with ./check."
_HELD_OUT_SHARE = 0.25  # of all functions; enough for hundreds of different held-out tasks
_HERE = Path(__file__).parent
_EXAMPLES, _HIDDEN = 4, 8  # cases per function: shown by ./check, kept by the evaluator


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Knobs of the family. Seconds; ``check_sigma`` is the spread of the logarithm of a check's time."""

    agent_s: float = 12.0  # about 2 % of executions run into it, all of them through a slow check
    check_median_s: float = 0.6
    check_sigma: float = 1.2  # 1 check in 100 takes over 16 times the median
    big_share: float = 0.3  # of tasks that have a second module


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A task before it is written out: module -> its functions. ``util.py`` is there in big tasks only."""

    modules: Mapping[str, tuple[Function, ...]]

    @property
    def documents(self) -> dict[str, str]:
        """The requirements files."""
        texts = {m: "".join(f"{f.requirement}\n" for f in fs) for m, fs in self.modules.items()}
        if "util.py" not in texts:
            return {"SPEC.md": f"lib.py\n{texts['lib.py']}"}
        return {
            "SPEC.md": f"lib.py\n{texts['lib.py']}util.py: see UTIL.md\n",
            "UTIL.md": f"util.py\n{texts['util.py']}",
        }

    def cases(self, rng: Random, count: int) -> dict[str, dict[str, list[list[Any]]]]:
        """Module -> signature -> cases, ``count`` per function."""
        return {m: {f.signature: f.cases(rng, count) for f in fs} for m, fs in self.modules.items()}


def functions_of(split: str) -> list[Function]:
    """All functions of a split, in a fixed order. The split of a function depends on nothing but the function."""
    every = [Function(n, b, c) for n in NAMES for b in BEHAVIOURS.values() for c in CONSTANTS]
    held_out = set(Random("quickstart split").sample(range(len(every)), int(_HELD_OUT_SHARE * len(every))))
    return [f for i, f in enumerate(every) if (i in held_out) == (split == "held_out")]


def draw(rng: Random, functions: Sequence[Function], *, big: bool) -> Blueprint:
    """One random task; within it no two functions share a name or a behaviour."""
    chosen: list[Function] = []
    wanted = 4 if big else rng.choice((2, 3, 3, 4))
    while len(chosen) < wanted:
        new = rng.choice(functions)
        if all(new.name != f.name and new.behaviour != f.behaviour for f in chosen):
            chosen.append(new)
    if big:
        return Blueprint({"lib.py": tuple(chosen[:2]), "util.py": tuple(chosen[2:])})
    return Blueprint({"lib.py": tuple(chosen)})


class QuickstartTasks:
    """A seeded task set (contract: ``executions.task.TaskSet``).

    Args:
        n_train, n_held_out: tasks of each split.
        seed: of everything; equal arguments give equal tasks on one installation.
        options: fields of ``Options``.

    Raises:
        ConfigError: an unknown or ill-typed option.
        TaskError: more different tasks asked for than can be drawn.
    """

    def __init__(self, n_train: int, n_held_out: int, seed: int, options: Mapping[str, Any] | None = None) -> None:
        self._options = read_options(options or {}, Options, "tasks.options")
        self._tasks = {s: self._make(s, n, seed) for s, n in zip(SPLITS, (n_train, n_held_out), strict=True)}

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            raise TaskError(f"unknown split {split!r}", where="quickstart tasks", right=" or ".join(SPLITS))
        return self._tasks[split]

    def _make(self, split: str, count: int, seed: int) -> list[Task]:
        rng = Random(f"quickstart/{split}/{seed}")
        functions = functions_of(split)
        seen: dict[str, Blueprint] = {}
        for _ in range(100 * count):
            if len(seen) == count:
                break
            big = (len(seen) + 1) * self._options.big_share // 1 > len(seen) * self._options.big_share // 1
            blueprint = draw(rng, functions, big=big)  # spread evenly, so that any few tasks hold their share
            seen.setdefault(json.dumps(sorted(blueprint.documents.items())), blueprint)
        if len(seen) < count:
            raise TaskError(f"{count} different tasks asked for", where=f"quickstart {split}", right=f"{len(seen)}")
        return [self._task(f"{split}-{seed}-{i:03d}", b) for i, b in enumerate(seen.values())]

    def _task(self, task_id: str, blueprint: Blueprint) -> Task:
        rng, o = Random(task_id), self._options
        check = _check_script(blueprint.cases(rng, _EXAMPLES), f"{task_id}", o.check_median_s, o.check_sigma)
        return Task(
            task_id=task_id,
            instruction=INSTRUCTION,
            files={**blueprint.documents, "check": check},
            executables=["check"],
            evaluator=[sys.executable, "-ISB", "{task}/evaluate.py", "{workspace}", "{reward}"],
            evaluator_files={
                "evaluate.py": (_HERE / "evaluate.py").read_text(),
                "spec.json": json.dumps(blueprint.cases(rng, _HIDDEN)),
            },
            deadlines=Deadlines(boot_s=20.0, agent_s=o.agent_s, evaluator_s=60.0, cleanup_s=10.0),
        )


def _check_script(cases: dict[str, Any], seed: str, median_s: float, sigma: float) -> str:
    """``check.py`` as an executable: sh starts it with this very interpreter, wherever that is.

    To Python the first lines are a string literal, which runs on into the docstring.
    """
    source = (_HERE / "check.py").read_text()
    head = f"""#!/bin/sh\n'''exec' "{sys.executable}" -ISB "$0" "$@"\n' '''"""
    filled = source.replace("CASES: Cases = {}", f"CASES: Cases = {cases!r}", 1)
    blank = 'SEED, MEDIAN_S, SIGMA = "", 0.0, 0.0'
    filled = filled.replace(blank, f"SEED, MEDIAN_S, SIGMA = {seed!r}, {median_s}, {sigma}", 1)
    return head + filled
