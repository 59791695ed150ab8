"""The scripted agent whose work through Claude Code the policy is warm-started on: well-formed calls, unreliable ways.

It decides from the visible conversation alone, so that a policy that sees the same conversation can learn the same
habits. ``Habits`` are the known rates of what it does wrong: it takes the careless way of a chore, overwrites ``conf``
instead of editing it, leaves out the check, gives up on a failed one, and errs again while mending. These few
decisions, shared by all tasks, are what reinforcement learning can put right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from chores import SHELL, Chore, place

from opengyre.config import RunConfig
from opengyre.proxy.render import Renderer
from opengyre.rollout.program import ProgramEngine, Said

_PHRASES = {kind: re.escape(k.phrase).replace(r"\{file\}", r"(?P<subject>\w+)") for kind, k in SHELL.items()}
_PHRASES["set"] = r"set (?P<subject>\w+) to (?P<value>\d+) in conf"
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_CHECKED = re.compile(r"^(\w+): (OK|FAILED)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of the demonstrator's decisions."""

    right: float = 0.6  # of each chore: the way that works
    right_when_mending: float = 0.4  # of one that the check reported: who erred once tends to err again
    checks: float = 0.7  # runs ./check before it says it is done
    mends: float = 0.6  # goes on after a failed check


@dataclass(slots=True)
class _Seen:
    """What the conversation shows. ``failed`` are the files a check complained of since the last command."""

    todo: list[Chore] = field(default_factory=list)
    conf: dict[str, str] = field(default_factory=dict)
    worked: bool = False
    overwritten: bool = False
    edited: bool = False
    checked: bool = False
    failed: set[str] = field(default_factory=set)


class Demonstrator:
    """A ``rollout.program.Program``."""

    def __init__(self, habits: Habits) -> None:
        self.habits = habits

    def __call__(self, turns: Sequence[str], random: Random) -> Said:
        seen, dice = look(turns), Dice(random)
        return Said(self._next(seen, dice), dice.logprob)

    def _next(self, seen: _Seen, dice: Dice) -> str:
        h = self.habits
        if not seen.todo:
            return call("Read", file_path="TODO.md")
        setting = next((c for c in seen.todo if c.kind == "set"), None)
        if not seen.worked:
            return work(seen.todo, h.right, dice)
        if setting is not None and setting.subject in seen.conf and not (seen.overwritten or seen.edited):
            return edit(setting, seen.conf[setting.subject])
        if not seen.checked:
            return call("Bash", command="./check") if dice(h.checks) else "Done."
        again = [c for c in seen.todo if c.kind != "set" and place(c) in seen.failed]
        return work(again, h.right_when_mending, dice) if again and dice(h.mends) else "Done."


class Dice:
    """Chance that remembers how likely what it decided was."""

    def __init__(self, random: Random) -> None:
        self._random, self.logprob = random, 0.0

    def __call__(self, odds: float) -> bool:
        won = self._random.random() < odds
        self.logprob += math.log(odds if won else 1.0 - odds)
        return won


def work(todo: list[Chore], right: float, dice: Dice) -> str:
    """One shell command for all chores; the right way for ``conf`` is to look at it in the same turn."""
    commands, look_at_conf = [], False
    for chore in todo:
        good = dice(right)
        if chore.kind == "set" and good:
            look_at_conf = True
        else:
            commands.append(chore.command(right=good))
    said = call("Bash", command="\n".join(commands))
    return said + "\n" + call("Read", file_path="conf") if look_at_conf else said


def edit(setting: Chore, old: str) -> str:
    """The edit that sets a value which is ``old`` now."""
    key = setting.subject
    return call("Edit", file_path="conf", old_string=f"{key}={old}", new_string=f"{key}={setting.value}")


def call(name: str, **arguments: str) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def look(turns: Sequence[str]) -> _Seen:
    """Read the conversation: each call with the result that answers it, in order."""
    seen, waiting = _Seen(), list[dict[str, dict[str, str]]]()
    for turn in turns:
        role, _, text = turn.lstrip("\n").partition("\n")
        if role == "assistant":
            waiting = [json.loads(found) for found in _CALL.findall(text)]
        elif role == "tool" and waiting:
            _note(seen, waiting.pop(0)["arguments"], text)
    return seen


def _note(seen: _Seen, arguments: dict[str, str], result: str) -> None:
    path = arguments.get("file_path")
    if path == "TODO.md":
        seen.todo = chores_of(result)
    elif path == "conf" and "new_string" in arguments:
        seen.edited, seen.checked = True, False
    elif path == "conf":
        seen.conf = dict(re.findall(r"^\d+\t(\w+)=(\w+)$", result, re.MULTILINE))
    elif arguments.get("command") == "./check":
        seen.checked, seen.failed = True, {file for file, word in _CHECKED.findall(result) if word == "FAILED"}
    elif "command" in arguments:
        seen.worked, seen.checked = True, False
        seen.overwritten |= "> conf" in arguments["command"]


def chores_of(text: str) -> list[Chore]:
    """The chores that a listing of TODO.md shows."""
    found = []
    for label, line in re.findall(r"^(?:\d+\t)?([a-z]): (.*)$", text, re.MULTILINE):
        for kind, phrase in _PHRASES.items():
            if match := re.fullmatch(phrase, line):
                value = int(match.groupdict().get("value") or 0)
                found.append(Chore(label, kind, match["subject"], value))
    return found


def engine(config: RunConfig, renderer: Renderer) -> ProgramEngine:
    """For ``opengyre collect --engine examples/claude_code/demonstrator.py:engine``."""
    return ProgramEngine(renderer, Demonstrator(Habits()), seed=config.seed)
