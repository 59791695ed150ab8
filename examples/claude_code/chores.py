"""A task family for a coding agent's own tools: small chores on the files of a folder.

    TODO.md   a: largest in prices                 the agent reads it, runs shell commands, edits a file with its tool,
              b: errors in logs                    may run ./check, mends what fails
              c: set depth to 40 in conf
    ./check   a: OK / b: FAILED / conf: OK         knows checksums only

Each chore has one right way and one careless way that looks right: sorting numbers as text, counting neighbours instead
of distinct lines, overwriting a file instead of editing it. The files are made so that the careless way always gives
something else, and no careless way is another chore's right way. The reward is the share of chores done; which (kind,
file) pairs occur is split between training and held-out tasks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from opengyre.config import TasksConfig
from opengyre.executions.tasks_folder import FolderTasks

LABELS = "abc"
FILES = (
    *("ages", "bills", "costs", "fees", "goals", "hosts", "jobs", "logs"),
    *("marks", "miles", "orders", "ports", "rates", "sales", "tags", "users"),
)
KEYS = ("alpha", "burst", "depth", "width")
HELD_OUT_SHARE = 0.25  # of the (kind, file) pairs; enough for hundreds of different held-out tasks
CONF_SHARE = 0.4  # of tasks that have a file to edit
INSTRUCTION = "Do the chores of TODO.md."


@dataclass(frozen=True, slots=True)
class Kind:
    """A chore that one shell command does. ``{file}`` is filled in; ``lines`` makes a file on which the two differ."""

    phrase: str
    right: str
    careless: str
    lines: Callable[[Random], list[str]]
    answer: Callable[[list[str]], str]


def _numbers(rng: Random) -> list[str]:
    """Distinct; the largest number has three digits and starts with 1, so as text it is among the smallest."""
    some = [rng.randint(20, 99) for _ in range(rng.randint(6, 12))] + [rng.randint(100, 199)]
    rng.shuffle(some)
    return [str(n) for n in some]


def _repeats(rng: Random) -> list[str]:
    """Few values, the first one also last: neighbours are never all there is."""
    words = [f"v{n}" for n in rng.sample(range(10, 99), 4)]
    return [words[0], *(rng.choice(words) for _ in range(rng.randint(6, 12))), words[1], words[0]]


def _log(rng: Random) -> list[str]:
    """Errors in both cases."""
    rest = [rng.choice(("ok", "error", "ERROR")) for _ in range(rng.randint(6, 12))]
    return ["ok", "error", "ERROR", *rest]


SHELL = {
    "largest": Kind(
        "largest in {file}",
        "sort -n {file} | tail -1",
        "sort {file} | tail -1",
        _numbers,
        lambda t: str(max(map(int, t))),
    ),
    "count": Kind("lines in {file}", "wc -l < {file}", "wc -l {file}", _repeats, lambda t: str(len(t))),
    "distinct": Kind(
        "distinct in {file}", "sort -u {file} | wc -l", "uniq {file} | wc -l", _repeats, lambda t: str(len(set(t)))
    ),
    "sum": Kind(
        "sum of {file}",
        "awk '{{s+=$1}} END {{print s}}' {file}",
        "awk '{{print s+=$1}}' {file}",
        _numbers,
        lambda t: str(sum(map(int, t))),
    ),
    "errors": Kind(
        "errors in {file}",
        "grep -ic error {file}",
        "grep -c error {file}",
        _log,
        lambda t: str(sum(line.lower() == "error" for line in t)),
    ),
}


@dataclass(frozen=True, slots=True)
class Chore:
    """One line of TODO.md: a shell chore on ``subject``, a file; or "set": ``subject``, a key, to ``value``."""

    label: str
    kind: str
    subject: str
    value: int = 0

    @property
    def line(self) -> str:
        """How TODO.md says it."""
        if self.kind == "set":
            return f"{self.label}: set {self.subject} to {self.value} in conf"
        return f"{self.label}: {SHELL[self.kind].phrase.format(file=self.subject)}"

    def command(self, *, right: bool) -> str:
        """The shell command. The right way to set a value is no command but the edit tool."""
        if self.kind == "set":
            return f"echo {self.subject}={self.value} > conf"
        kind = SHELL[self.kind]
        return f"{(kind.right if right else kind.careless).format(file=self.subject)} > {self.label}"


def pairs(split: str) -> list[tuple[str, str]]:
    """The (kind, subject) pairs of a split; they depend on nothing but themselves."""
    every = [(kind, file) for kind in SHELL for file in FILES]
    held_out = set(Random("chores").sample(every, int(HELD_OUT_SHARE * len(every))))
    return [pair for pair in every if (pair in held_out) == (split == "held_out")]


def draw(rng: Random, split: str, conf_share: float = CONF_SHARE) -> list[Chore]:
    """The chores of one random task: three, on different files, of different kinds."""
    chosen: dict[str, str] = {}
    wanted = 2 if rng.random() < conf_share else 3
    choice = pairs(split)
    while len(chosen) < wanted:
        kind, file = rng.choice(choice)
        if file not in chosen.values():
            chosen.setdefault(kind, file)
    todo = list(chosen.items())
    if wanted == 2:
        todo.insert(rng.randrange(3), ("set", rng.choice(KEYS)))
    return [
        Chore(label, kind, subject, rng.randint(10, 99)) for label, (kind, subject) in zip(LABELS, todo, strict=True)
    ]


def workspace(chores: list[Chore], rng: Random) -> tuple[dict[str, str], dict[str, str]]:
    """(the files the agent starts from, the files and contents that are to be there in the end by label)."""
    files = {"TODO.md": "".join(f"{chore.line}\n" for chore in chores)}
    wanted: dict[str, str] = {}
    for chore in chores:
        if chore.kind == "set":
            old = {key: rng.randint(10, 99) for key in rng.sample(KEYS, len(KEYS))}
            old[chore.subject] = rng.choice([n for n in range(10, 100) if n != chore.value])
            files["conf"] = "".join(f"{key}={value}\n" for key, value in old.items())
            wanted[chore.label] = "".join(f"{k}={v}\n" for k, v in (old | {chore.subject: chore.value}).items())
        else:
            lines = SHELL[chore.kind].lines(rng)
            files[chore.subject] = "".join(f"{line}\n" for line in lines)
            wanted[chore.label] = SHELL[chore.kind].answer(lines) + "\n"
    return files, wanted


def place(chore: Chore) -> str:
    """The file a chore's outcome is in."""
    return "conf" if chore.kind == "set" else chore.label


def check_script(chores: list[Chore], wanted: dict[str, str]) -> str:
    """``./check``: says which files are as they should be, not how they should be."""
    sums = "".join(f"{hashlib.sha256(wanted[c.label].encode()).hexdigest()}  {place(c)}\n" for c in chores)
    return f"#!/bin/sh\nsha256sum --check 2>/dev/null <<END\n{sums}END\n"


EVALUATOR = """\
import json, pathlib, sys
workspace, reward, task = (pathlib.Path(p) for p in (*sys.argv[1:3], __file__))
wanted = json.loads((task.parent / "wanted.json").read_text())
def done(file, content):
    path = workspace / file
    return path.is_file() and path.read_bytes()[:1000] == content.encode()
checks = {label: float(done(*each)) for label, each in wanted.items()}
reward.write_text(json.dumps({"reward": sum(checks.values()) / len(checks), "checks": checks}))
"""


def write_task(folder: Path, chores: list[Chore], rng: Random) -> None:
    """A task folder as ``tasks.kind = "folder"`` reads it."""
    files, wanted = workspace(chores, rng)
    (folder / "workspace").mkdir(parents=True)
    (folder / "evaluator").mkdir()
    for name, content in files.items():
        (folder / "workspace" / name).write_text(content)
    check = folder / "workspace" / "check"
    check.write_text(check_script(chores, wanted))
    check.chmod(0o755)
    (folder / "evaluator" / "evaluate.py").write_text(EVALUATOR)
    expected = {c.label: (place(c), wanted[c.label]) for c in chores}
    (folder / "evaluator" / "wanted.json").write_text(json.dumps(expected))
    argv = [sys.executable, "-ISB", "{task}/evaluate.py", "{workspace}", "{reward}"]
    (folder / "task.toml").write_text(
        f"instruction = {json.dumps(INSTRUCTION)}\nevaluator = {json.dumps(argv)}\n\n"
        # An execution takes two seconds; twenty times that on a machine with as much other work is no policy's fault.
        "[deadlines]\nboot_s = 60.0\nagent_s = 300.0\nevaluator_s = 60.0\ncleanup_s = 20.0\n"
    )


def write_tasks(
    folder: Path, *, train: int, held_out: int, seed: int = 0, conf_share: float = CONF_SHARE, new_pairs: bool = True
) -> None:
    """``folder/{train,held_out}/…``: different tasks, the same for the same seed.

    ``new_pairs``: held-out tasks have pairs no training task has; else only the combination of pairs is new.
    """
    seen = set[str]()
    for split, count in (("train", train), ("held_out", held_out)):
        rng, made = Random(f"chores/{split}/{seed}"), 0
        while made < count:
            chores = draw(rng, split if new_pairs else "train", conf_share)
            text = "\n".join(chore.line for chore in chores)
            if text not in seen:
                write_task(folder / split / f"{split}-{made:03d}", chores, rng)
                seen.add(text)
                made += 1


def task_set(config: TasksConfig) -> FolderTasks:
    """For ``tasks.kind = "examples/claude_code/chores.py:task_set"``: written to ``tasks.path`` when first asked for.

    ``tasks.options`` are ``conf_share`` and ``new_pairs`` of ``write_tasks``.
    """
    folder = Path(config.path or "runs/claude-code/tasks")
    if not folder.exists():
        write_tasks(folder, train=config.train, held_out=config.held_out, seed=config.seed, **config.options)
    return FolderTasks(folder, seed=config.seed)
