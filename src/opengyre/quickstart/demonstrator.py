"""The scripted author whose recorded work the shipped policy is warm-started on: competent and unreliable.

It is a model call for ``harness.Agent`` and decides from the visible history alone, so that a policy that sees the same
history can learn the same habits. It always writes well-formed calls and copies names and constants correctly. What it
does wrong is systematic, and set by ``Habits``: for each behaviour it takes the careless expression for the right one
with a fixed probability, it leaves out the check, it gives up on a failed check, it makes the same mistake again while
fixing, it re-reads what it has just written, and it does a helper module itself instead of delegating it. These few
decisions, shared by all tasks, are what reinforcement learning can put right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from opengyre.quickstart import check, harness
from opengyre.quickstart.behaviours import BEHAVIOURS, Function
from opengyre.quickstart.tasks import Blueprint

_DOCUMENT = {"lib.py": "SPEC.md", "util.py": "UTIL.md"}
_LINE = re.compile(r"^(\w+\([xs]\)) (ok|FAIL)$", re.MULTILINE)
DONE = "Done."


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of the demonstrator's decisions."""

    right: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(BEHAVIOURS, 0.6)
    )  # by behaviour: the expression is the reference
    right_when_fixing: float = 0.4  # of a function the check reported: who erred once tends to err again
    checks: float = 0.7  # runs ./check before it says it is done
    sub_checks: float = 0.4  # the same, in a sub-agent
    fixes: float = 0.6  # goes on after a failed check
    delegates: float = 0.85  # gives util.py to a sub-agent
    at_once: float = 0.5  # of delegations: in the same turn as writing lib.py
    rereads: float = 0.1  # reads back what it wrote


@dataclass(slots=True)
class _Seen:
    """What the visible history says. ``state``: signature -> ok, from the last check since the last write."""

    read: set[str] = field(default_factory=set)
    written: dict[str, str] = field(default_factory=dict)  # module -> source; "" if only the summary says so
    state: dict[str, bool] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)  # by the last check, also after a write
    known_good: set[str] = field(default_factory=set)
    checked: bool = False
    reread: bool = False
    resumed: bool = False


class Demonstrator:
    """Plays the policy for one execution of ``blueprint``."""

    def __init__(self, blueprint: Blueprint, rng: Random, habits: Habits) -> None:
        self.blueprint, self.rng, self.habits = blueprint, rng, habits
        self._count = 0

    def reply(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Content blocks of the next turn."""
        sub = request["system"][0]["text"] == harness.SUB_SYSTEM
        seen = self._look(request["messages"])
        last = request["messages"][-1]["content"][-1]
        if last["type"] == "text" and last["text"] == harness.ASK_SUMMARY:
            return [_text(self._summary(seen))]
        return self._module_turn(seen) if sub else self._main_turn(seen)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _module_turn(self, seen: _Seen) -> list[dict[str, Any]]:
        """A sub-agent's turn: read, write, perhaps check and fix."""
        if "UTIL.md" not in seen.read:
            return [self._call("read", path="UTIL.md")]
        if "util.py" not in seen.written:
            return [self._write("util.py", seen)]
        if not seen.checked:
            return self._verify(seen, self.habits.sub_checks, "./check util.py", "util.py")
        if not all(seen.state.values()) and self._chance(self.habits.fixes):
            return [self._write("util.py", seen)]
        return [_text(DONE)]

    def _main_turn(self, seen: _Seen) -> list[dict[str, Any]]:
        big = "util.py" in self.blueprint.modules
        failing = self._failing(seen)
        if seen.resumed and "SPEC.md" not in seen.read:
            if seen.checked and (not failing or not self._chance(self.habits.fixes)):
                return [_text(DONE)]
            if not seen.checked and self._written_all(seen):
                return self._verify(seen, self.habits.checks, "./check", None)
        if "SPEC.md" not in seen.read:
            return [self._call("read", path="SPEC.md")]
        if "UTIL.md" in seen.read and "util.py" not in seen.written:
            return [self._write("util.py", seen)]
        if "lib.py" not in seen.written:
            write = self._write("lib.py", seen)
            if big and "util.py" not in seen.written and self._chance(self.habits.delegates * self.habits.at_once):
                return [self._delegate(), write]
            return [write]
        if big and "util.py" not in seen.written:
            odds = self.habits.delegates * (1 - self.habits.at_once) / (1 - self.habits.delegates * self.habits.at_once)
            return [self._delegate() if self._chance(odds) else self._call("read", path="UTIL.md")]
        if not seen.checked:
            return self._verify(seen, self.habits.checks, "./check", "lib.py")
        just_resumed = seen.resumed and not seen.state
        if failing and (just_resumed or self._chance(self.habits.fixes)):
            return self._repair(failing, seen)
        return [_text(DONE)]

    def _repair(self, failing: list[str], seen: _Seen) -> list[dict[str, Any]]:
        """One turn that rewrites every module with a failing function; a helper module is delegated once more."""
        blocks = []
        if "util.py" in failing:
            mine = "UTIL.md" in seen.read
            blocks.append(self._write("util.py", seen) if mine else self._delegate())
        if "lib.py" in failing:
            blocks.append(self._write("lib.py", seen))
        return blocks

    def _verify(self, seen: _Seen, odds: float, command: str, reread: str | None) -> list[dict[str, Any]]:
        if reread and not seen.reread and self._chance(self.habits.rereads):
            return [self._call("read", path=reread)]
        return [self._call("run", command=command)] if self._chance(odds) else [_text(DONE)]

    def _write(self, module: str, seen: _Seen) -> dict[str, Any]:
        source = "".join(self._define(f, seen) for f in self.blueprint.modules[module])
        return self._call("write", path=module, content=source)

    def _define(self, function: Function, seen: _Seen) -> str:
        signature = function.signature
        odds = self.habits.right[function.behaviour.key]
        if signature in seen.known_good:
            odds = 1.0
        elif signature in seen.failed:
            odds = self.habits.right_when_fixing
        return function.definition(right=self._chance(odds))

    def _summary(self, seen: _Seen) -> str:
        head = " and ".join(m for m in ("lib.py", "util.py") if m in seen.written) or "Nothing"
        lines = [f"{head} written."]
        if seen.checked:
            lines += [f"{s} FAIL" for s, good in seen.state.items() if not good] or ["All ok."]
        return "\n".join(lines)

    # -- history -----------------------------------------------------------------------------------------------------

    def _look(self, messages: list[dict[str, Any]]) -> _Seen:
        seen = _Seen()
        _, _, summary = messages[0]["content"][0]["text"].partition(harness.SUMMARY_HEAD)
        if summary:
            self._resume(seen, summary)
        calls: dict[str, dict[str, Any]] = {}
        for block in (b for m in messages for b in m["content"]):
            if block["type"] == "tool_use":
                calls[block["id"]] = block
            elif block["type"] == "tool_result":
                self._note(seen, calls[block["tool_use_id"]], str(block["content"]))
        return seen

    def _resume(self, seen: _Seen, summary: str) -> None:
        seen.resumed = True
        for module in ("lib.py", "util.py"):
            if module in summary:
                seen.written[module] = ""
        seen.failed = {signature for signature, _ in _LINE.findall(summary)}
        seen.checked = bool(seen.failed) or "All ok." in summary
        if seen.checked:
            every = {f.signature for fs in self.blueprint.modules.values() for f in fs}
            seen.known_good = every - seen.failed

    def _note(self, seen: _Seen, call: dict[str, Any], result: str) -> None:
        arguments = call["input"]
        match call["name"]:
            case "read":
                seen.read.add(arguments["path"])
                seen.reread |= arguments["path"].endswith(".py")
            case "write":
                seen.written[arguments["path"]] = arguments["content"]
                seen.checked = seen.reread = False
            case "agent":
                seen.written["util.py"] = ""
                seen.checked = False
            case "run":
                seen.state = {s: verdict == "ok" for s, verdict in _LINE.findall(result)}
                seen.failed = {s for s, good in seen.state.items() if not good}
                seen.known_good = {s for s, good in seen.state.items() if good}
                seen.checked = True

    def _failing(self, seen: _Seen) -> list[str]:
        modules = self.blueprint.modules
        return [m for m, fs in modules.items() if any(f.signature in seen.failed for f in fs)]

    def _written_all(self, seen: _Seen) -> bool:
        return all(m in seen.written for m in self.blueprint.modules)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _chance(self, odds: float) -> bool:
        return self.rng.random() < odds

    def _delegate(self) -> dict[str, Any]:
        return self._call("agent", task="Write the module of UTIL.md.")

    def _call(self, name: str, **arguments: str) -> dict[str, Any]:
        self._count += 1
        return {"type": "tool_use", "id": f"call_{self._count}", "name": name, "input": arguments}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def memory_tools(blueprint: Blueprint, rng: Random) -> tuple[dict[str, Any], dict[str, str]]:
    """The harness's tools over a dictionary of files, and that dictionary; ``./check`` takes no time."""
    files: dict[str, str] = dict(blueprint.documents)
    cases = blueprint.cases(rng, 4)

    def read(path: str) -> str:
        if path not in files:
            raise ValueError("No such file or directory")
        return files[path]

    def write(path: str, content: str) -> str:
        files[path] = content
        return "ok"

    def run(command: str) -> str:
        program, *asked = command.split()
        if program != "./check":
            return f"/bin/sh: 1: {program}: not found\n"
        return check.report(files, {m: c for m, c in cases.items() if not asked or m in asked}) or "no such module\n"

    return {"read": read, "write": write, "run": run}, files
