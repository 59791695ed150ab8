"""What the client tests of several harnesses play alike. What differs between harnesses is a ``Kit``.

A part knows where it stands by what it is shown, never by how often it was asked: each step's output begins with
``STEPn:``, and so do summaries, so that the count survives whatever a harness does to its history.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from clients import Played, Stage, staged
from engines import ScriptedEngine
from opengyre.executions.outcome import Outcome
from opengyre.executions.sandbox import bubblewrap
from player import Ask, Say, calls, thinks

Call = tuple[str, dict[str, Any]]
STEP = re.compile(r"STEP(\d+):")
SUB_TASK = re.compile(r"write FILE (\w+) \.")
SANDBOX = "local" if bubblewrap.probe() else "bubblewrap"
KEEPALIVE_S = 5.0
FEW = {"max_calls": 40}  # a part that does not get on must not play for ever


@dataclass(frozen=True)
class Kit:
    """How a harness is spoken to: its shell tool, what ends its run, how it asks for a summary, how it delegates."""

    kind: str
    shell: Callable[[str], Call]
    end: str = "All done."
    summary: Callable[[Ask], bool] = lambda _: False
    delegate: Callable[[str], Call] | None = None

    def step(self, n: int, fill: int = 0, **thought: str) -> str:
        """A turn that does step ``n``; its output is ``fill`` characters longer (one token each)."""
        pad = f"; head -c {fill} /dev/zero | tr '\\0' '~'" if fill else ""
        return thinks(f"step {n}", calls(self.shell(f"echo {n} > step{n}; printf 'STEP%s:' {n}{pad}"), **thought))


def steps(ask: Ask) -> int:
    """Steps done so far."""
    return max((int(n) + 1 for _, text in ask.messages for n in STEP.findall(text)), default=0)


def wanted(n: int) -> dict[str, str]:
    """What ``n`` steps leave in the workspace."""
    return {f"step{i}": str(i) for i in range(n)}


def switching(stage: Stage) -> Callable[[ScriptedEngine], Any]:
    """A role switch in the middle of a turn: out of the balancer, stop, train, come back with the next version."""
    tasks: list[asyncio.Task[None]] = []

    async def leave(engine: ScriptedEngine) -> None:
        stage.door.router.remove(engine.name)
        tasks.append(asyncio.create_task(come_back(engine)))

    async def come_back(engine: ScriptedEngine) -> None:
        await stage.door.router.drained(engine.name)
        engine.version += 1
        stage.door.router.add(engine, 8)

    return leave


def working(kit: Kit, stage: Callable[[], Stage], extra: list[str]) -> Callable[[Ask], Say]:
    """Steps in every form a turn can have, over cells that die and switch roles. ``extra`` are further turns' texts,
    each of which must call a tool whose command prints the next ``STEPn:``, from 4 on."""

    def part(ask: Ask) -> Say:
        n, leave = steps(ask), switching(stage())
        turns = [
            Say(kit.step(0, text="  I begin. \n"), [(0, "dies")]),  # before the turn
            Say(kit.step(1), [(5, "dies")]),  # during it
            Say(
                thinks("two at once", calls(kit.shell("echo a > a; printf A"), _step(kit, 2), text="Both.")),
                [(7, leave), (7, "preempted")],
            ),
            Say(kit.step(3), [(at, what) for at in (0, 9, 20) for what in (leave, "preempted_without_kv")]),
            *map(Say, extra),
        ]
        return replace(turns[n] if n < len(turns) else Say(kit.end), role="main")

    return part


async def grow(folder: Path, kit: Kit, extra: list[str], ask: str = "Do the steps.", **settings: Any) -> Played:
    """A client's history that only grows, over cells that die and switch roles; checked to be one leaf, whole."""
    settings = {"cells": 2, "keepalive_s": KEEPALIVE_S, "executions": FEW, "sandbox": SANDBOX, **settings}
    async with staged(folder, kit.kind, working(kit, lambda: stage, extra), **settings) as stage:
        played = await stage.run(ask, wanted=wanted(4))
    check_worked(played, len(extra))
    return played


def _step(kit: Kit, n: int) -> Call:
    return kit.shell(f"echo {n} > step{n}; printf 'STEP%s:' {n}")


def check_worked(played: Played, extra: int) -> None:
    """A history that only grew is one leaf without a fork, and the record says which cell and version said what."""
    tree, counters = played.tree, played.session.counters
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.result.detail
    assert played.leaves == {"main": 1} and not played.forks, played.draw()
    assert len(tree.calls()) == counters.calls == 5 + extra, played.draw()
    assert counters.joined == counters.refused == counters.malformed_calls == counters.undelivered == 0
    assert [c.meta.moves for c in tree.calls()][:4] == [0, 1, 1, 3]  # one that dies without a word is no move
    pieces = [[(s.cell, s.version) for s in tree.node(c.reply_node).spans] for c in tree.calls()]
    assert [len(p) for p in pieces[:4]] == [1, 1, 2, 3], pieces
    assert all(cell != after for p in pieces for (cell, _), (after, _) in pairwise(p))


def filling(kit: Kit, n: int, fill: int) -> Callable[[Ask], Say]:
    """``n`` steps whose output fills the context, ``fill`` tokens each; a summary says how many are done."""

    def part(ask: Ask) -> Say:
        done = steps(ask)
        if kit.summary(ask):
            text = f"<state_snapshot>The last step done is STEP{done - 1}: go on.</state_snapshot>"
            return Say(text, role="main_summary")
        return Say(kit.step(done, fill) if done < n else kit.end, role="main")

    return part


def check_compacted(played: Played, n: int, *, refused: bool, exit_code: int = 0, edits: int = 0) -> int:
    """Each compaction leaves a main leaf behind it, and a summary; returns how many there were.

    ``edits``: how often the client changed what it had kept, once more, after it had gone on from it.
    """
    assert (played.result.exit_code, played.result.reward) == (exit_code, 1.0), played.log[-3000:]
    summaries = played.leaves["main_summary"]
    assert summaries >= 1 and played.leaves == {"main": summaries + 1 + edits, "main_summary": summaries}, played.draw()
    assert len(played.tree.calls()) == n + 1 + summaries, played.draw()
    assert (played.session.counters.refused > 0) == refused
    return summaries


def delegating(kit: Kit, *, at_once: bool = True) -> Callable[[Ask], Say]:
    """Two sub-agents; ``at_once``: neither goes on before both have begun."""
    assert kit.delegate is not None
    both = asyncio.Barrier(2 if at_once else 1)
    delegate = kit.delegate

    def part(ask: Ask) -> Say:
        task = next((m[1] for role, text in ask.messages if role == "user" and (m := SUB_TASK.search(text))), None)
        if task is not None:
            if "WRITTEN" in ask.last:
                return Say(f"{task} is written.", role="sub_agent")
            write = calls(kit.shell(f"echo {task} > {task}; printf 'WRITT%s' EN"))
            return Say(write, [(3, lambda _: both.wait())], role="sub_agent")
        if all(f"{name} is written." in ask for name in ("one", "two")):
            return Say("Both written.", role="main")
        return Say(calls(*(delegate(f"Please write FILE {name} .") for name in ("one", "two"))), role="main")

    return part


async def close_in_mid_turn(stage: Stage, kit: Kit) -> Played:
    """The session closes while the second turn is sampled: the client is told once, and ends."""

    async def close(_: ScriptedEngine) -> None:
        stage.door.sessions.close("x1")
        await asyncio.Event().wait()

    stage.player.part = lambda ask: Say(kit.step(steps(ask)), [(6, close)] if steps(ask) else [], "main")
    played = await stage.run("Do the steps.", wanted=wanted(1))
    assert (played.result.outcome, played.result.reward) == (Outcome.FINISHED, 1.0), played.log[-3000:]
    assert len(played.tree.calls()) == 2 and played.leaves == {"main": 1}, played.draw()
    return played
