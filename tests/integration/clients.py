"""Real clients on stage: an unmodified harness, run as in a run, against a real proxy whose policy plays a part.

    Runner ─▶ sandbox ─▶ harness ── HTTP ──▶ proxy ─▶ PlayedEngine(s): ``part(ask)`` says what the policy says
       └─▶ evaluator                            └─▶ record ─▶ Played: tree, roles, samples, all checked

A harness that is not installed is an error that says how to install it; ``OPENGYRE_NO_HARNESSES=1`` skips these tests
on purpose.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from door import Door, opened
from opengyre.config import RunConfig, build
from opengyre.errors import ConfigError
from opengyre.executions.harness.base import Harness, Limits
from opengyre.executions.harness.install import VARIABLE, require
from opengyre.executions.harness.registry import make_harness
from opengyre.executions.outcome import ExecutionResult
from opengyre.executions.runner import Runner
from opengyre.executions.task import Deadlines, Task
from opengyre.proxy.session import Sessions
from opengyre.record.draw import check_tree, draw_tree
from opengyre.record.roles import assign_roles
from opengyre.record.tree import Tree
from opengyre.record.types import Role
from opengyre.run.door import SessionDoor
from opengyre.samples.build import build_samples
from player import Part, PlayedEngine, Player

HARNESSES = Path(__file__).resolve().parents[2] / ".harnesses"  # where ./test installs them
KEEP = "OPENGYRE_KEEP_SESSIONS"  # a folder: sessions played are kept there, with the roles their scripts know
CALLS = "calls.sqlite"  # where the door keeps its record
CONTEXT = 200_000  # the test tokenizer makes about as many tokens as bytes, and Claude Code sends 66 kB of tools

# Reward 1 if the workspace holds what the task asks for: {path: content}, given as the third argument.
EVALUATOR = """
import json, pathlib, sys
place, wanted = pathlib.Path(sys.argv[1]), json.loads(sys.argv[3])
checks = {path: float((place / path).is_file() and (place / path).read_text().strip() == text.strip())
          for path, text in wanted.items()}
reward = min(checks.values(), default=1.0)
pathlib.Path(sys.argv[2]).write_text(json.dumps({"reward": reward, "checks": checks}))
"""


def needs(name: str) -> None:
    """Called at the top of a client test file: the pinned harness must be there."""
    if os.environ.get("OPENGYRE_NO_HARNESSES") == "1":
        pytest.skip(f"OPENGYRE_NO_HARNESSES=1: no {name}", allow_module_level=True)
    os.environ.setdefault(VARIABLE, str(HARNESSES))
    try:
        require(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; to leave the client tests out: OPENGYRE_NO_HARNESSES=1") from None


@dataclass
class Played:
    """One finished execution and all that was recorded of it. The tree is the one read back from the store."""

    result: ExecutionResult
    tree: Tree
    roles: dict[int, Role]
    log: str
    session: Any

    @property
    def leaves(self) -> Counter[str]:
        """How many leaves of each role."""
        return Counter(role.value for role in self.roles.values())

    @property
    def forks(self) -> Counter[str]:
        """How many calls forked, by reason."""
        return Counter(c.meta.fork_reason for c in self.tree.calls() if c.meta.fork_reason)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines a harness printed."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def said(self, leaf_role: str) -> list[list[int]]:
        """Sampled ids along each path that ends in a leaf of a role."""
        paths = [self.tree.rebuild(leaf) for leaf, role in self.roles.items() if role == leaf_role]
        return [path.ids[path.sampled].tolist() for path in paths]

    def draw(self) -> str:
        """The tree, for the message of a failed assertion."""
        return draw_tree(self.tree, self.roles, every=True)


class LateClock(SessionDoor):
    """A door that stops the agent's clock until an event: deadlines that do not depend on how slow a machine starts."""

    def __init__(self, sessions: Sessions, config: RunConfig, event: asyncio.Event | None) -> None:
        super().__init__(sessions, config)
        self._event, self._opened, self._seen = event, time.monotonic(), 0.0

    def held_s(self, execution_id: str) -> float:
        if self._event is None:
            return super().held_s(execution_id)
        if not self._event.is_set():
            self._seen = time.monotonic() - self._opened
        return self._seen


@dataclass
class Stage:
    """A door, the cells behind it, and a harness to send through it."""

    door: Door
    player: Player
    config: RunConfig
    root: Path
    runs: int = 0

    def cell(self, name: str, *, slots: int = 8, **options: Any) -> PlayedEngine:
        """Add a serving cell that plays the part."""
        made = PlayedEngine(name, self.player, **options)
        self.door.engines[name] = made
        self.door.router.add(made, slots)
        return made

    async def run(
        self,
        instruction: str,
        *,
        wanted: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        agent_s: float = 900.0,  # no test waits for it; a loaded machine starts a client in minutes
        harness: Harness | None = None,
        clock: asyncio.Event | None = None,
        checked: bool = True,
    ) -> Played:
        """One execution of the harness, from an empty workspace to its reward: 1 if it holds the files ``wanted``.

        ``harness`` stands in for the stage's own. ``clock``: the agent's time counts from when it is set. ``checked``:
        whatever happened, what holds for every execution is asserted (``check``).
        """
        self.runs += 1
        name = f"x{self.runs}"
        task = Task(
            task_id=name,
            instruction=instruction,
            files=files or {},
            evaluator=[sys.executable, "-ISB", "-c", EVALUATOR, "{workspace}", "{reward}", json.dumps(wanted or {})],
            deadlines=Deadlines(agent_s=agent_s),
            env=env or {},
        )
        limits = Limits(self.config.model.context, self.config.sampling.max_tokens)
        harness = harness or make_harness(self.config.harness, limits)
        door = LateClock(self.door.sessions, self.config, clock)
        runner = Runner(self.config, harness, door, self.root, lambda *_: None)
        result = await runner.run(name, "q", task)
        session = self.door.sessions.get(name)
        await session.settled()
        tree = self.door.store.load_tree(name)
        log = (self.root / "logs" / f"{name}.log").read_text(errors="replace")
        played = Played(result, tree, assign_roles(tree), log, session)
        if checked:
            self.check(played)
        return played

    def check(self, played: Played) -> None:
        """What holds for any execution: every path rebuilds, is what the engines saw, and trains each token once."""
        tree, live = played.tree, played.session.tree
        assert check_tree(tree) == []
        assert [tree.rebuild(x).ids.tolist() for x in tree.leaves()] == [
            live.rebuild(x).ids.tolist() for x in live.leaves()
        ]
        requests = {r.call_id: r for e in self.door.engines.values() for r in e.requests}
        for call in tree.calls():
            path = tree.rebuild(call.prompt_node if call.reply_node is None else call.reply_node)
            assert path.ids[: call.prompt_tokens].tolist() == requests[f"{call.meta.call_id}0000"].prompt_ids
        for leaf, role in played.roles.items():
            assert role == self.player.roles.get(tree.call_of(leaf).meta.call_id, role), played.draw()
        check_trained_once(tree, played.roles)


def check_trained_once(tree: Tree, roles: dict[int, Role]) -> None:
    """With room for every path, each trainable token is trained in exactly one sample."""
    samples = build_samples(
        tree, roles, execution_id="x", query_id="q", advantage=1.0, j_max=len(tree.leaves()) or 1, run_seed=0
    )
    trained: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        path = tree.rebuild(int(sample.sample_id.rpartition("/")[2]))
        assert sample.ids.tolist() == path.ids.tolist()
        starts = {int(node): tree.node(int(node)).start for node in np.unique(path.nodes)}
        places = np.flatnonzero(sample.mask)
        trained.update((int(path.nodes[i]), int(i) - starts[int(path.nodes[i])]) for i in places)
    assert not trained or max(trained.values()) == 1
    replies = {c.reply_node for c in tree.calls() if c.reply_node is not None and tree.trainable(c.reply_node)}
    assert len(trained) == sum(len(tree.node(node)) for node in replies)


@asynccontextmanager
async def staged(
    root: Path,
    kind: str,
    part: Part,
    *,
    options: dict[str, Any] | None = None,
    sandbox: str = "local",
    context: int = CONTEXT,
    cells: int = 1,
    sampling: dict[str, Any] | None = None,
    executions: dict[str, Any] | None = None,
    **proxy: Any,
) -> AsyncIterator[Stage]:
    """A stage for a harness ``kind``: cells ``a``, ``b``, … serve and say what ``part`` says.

    ``options`` are the harness's, ``proxy`` is the proxy table of the config.
    """
    config = build(
        {
            "model": {"context": context},
            "harness": {"kind": kind, "options": options or {}},
            "sandbox": {"kind": sandbox, "keep_workspaces": True},
            "sampling": sampling or {},
            "executions": executions or {},
            "proxy": proxy,
        }
    )
    async with opened(root, context=context, max_calls=config.executions.max_calls, **proxy) as door:
        stage = Stage(door, Player(door.renderer, part), config, root / "executions")
        for name in "abcdefgh"[:cells]:
            stage.cell(name)
        yield stage
    if folder := os.environ.get(KEEP):
        _keep(Path(folder), kind, root, stage.player.roles)


def _keep(folder: Path, kind: str, root: Path, roles: dict[str, str]) -> None:
    """The calls of a stage and who really made them, for ``benchmarks/roles.py``."""
    place = folder / kind / root.name
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / CALLS, place / "calls.db")
    (place / "roles.json").write_text(json.dumps(roles))
