"""What there is to export: the finished executions of a run folder, or of a folder that ``opengyre proxy`` recorded.

    calls.db ── outcomes, all at once: who counts, and what each is worth in its group
             ── trees, one at a time ──▶ roles ──▶ selection ──▶ samples, one at a time

Reads only, also while the run goes on. A tree is in memory while its own samples are made, and one path beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opengyre.config import RunConfig
from opengyre.errors import ConfigError
from opengyre.export.messages import messages_of
from opengyre.export.sample import About, ExportSample, spans_of
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store, StoredExecution
from opengyre.record.tree import Tree
from opengyre.record.types import Role
from opengyre.run.preflight import CONFIG_FILE, load_run
from opengyre.samples.advantage import group_advantage
from opengyre.samples.build import samples_of
from opengyre.samples.select import load_picker, paths_of, select

EVERY_LEAF = 1 << 30  # as j_max: more paths than any tree has


@dataclass(frozen=True, slots=True)
class Choice:
    """Which executions and which of their trajectories.

    Args:
        split: ``train``, ``held_out`` or ``all``.
        min_reward: executions with less, and those without a reward, are left out; None: no bound.
        unscored: executions without a reward too; they have no advantage.
        roles: leaves of other roles are left out before the selection.
        j_max: trajectories per execution; None: as the run was configured, ``EVERY_LEAF``: all.
        seed: of the selection; None: the run's.
        executions: only these; empty: all.
        messages: the conversation beside the tokens.
    """

    split: Literal["train", "held_out", "all"] = "train"
    min_reward: float | None = None
    unscored: bool = False
    roles: tuple[Role, ...] = tuple(Role)
    j_max: int | None = None
    seed: int | None = None
    executions: tuple[str, ...] = ()
    messages: bool = False


@dataclass
class Counted:
    """What an export went through. ``left_out`` counts executions by reason."""

    executions: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class Source:
    """A folder to export from. Close it, or use it as a context."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when nothing was recorded there."""
        if not (folder / "calls.db").is_file():
            what = "holds no recorded calls" if folder.is_dir() else "is no folder"
            raise ConfigError(what, where=str(folder), right="a folder made by opengyre train, collect or proxy")
        self.config = load_run(folder) if (folder / CONFIG_FILE).is_file() else RunConfig()
        self._picker = load_picker(self.config.samples.picker)
        self._store = Store.open(folder / "calls.db", readonly=True)
        self._folder = folder

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def samples(self, choice: Choice, counted: Counted | None = None) -> Iterator[ExportSample]:
        """Samples of the chosen executions, in order of their ids.

        Raises:
            ConfigError: no execution is finished, or none is left by ``choice``.
        """
        counted = Counted() if counted is None else counted
        for about in self._chosen(choice, counted):
            yield from self.of_tree(self._store.load_tree(about.execution_id), about, choice, counted)

    def of_tree(
        self, tree: Tree, about: About, choice: Choice, counted: Counted | None = None
    ) -> Iterator[ExportSample]:
        """The samples of one execution."""
        counted = Counted() if counted is None else counted
        seed = self.config.seed if choice.seed is None else choice.seed
        j_max = self.config.samples.j_max if choice.j_max is None else choice.j_max
        paths = [path for path in paths_of(tree, assign_roles(tree)) if path.role in choice.roles]
        name = about.execution_id
        picks = select(paths, j_max=j_max, run_seed=seed, execution_id=name, picker=self._picker)
        counted.executions += bool(picks)
        counted.left_out["nothing to train"] += not picks
        advantage = math.nan if about.advantage is None else about.advantage
        made = samples_of(tree, picks, execution_id=name, query_id=about.query_id, advantage=advantage)
        for pick, sample in zip(picks, made, strict=True):
            counted.samples += 1
            counted.tokens += len(sample.ids)
            counted.trained += sample.tokens
            said = messages_of(self._store, tree, name, pick.leaf) if choice.messages else None
            yield ExportSample(sample, about, spans_of(tree, pick.leaf), said)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _chosen(self, choice: Choice, counted: Counted) -> list[About]:
        stored = self._store.executions()
        finished = [self._about(e) for e in stored if e.outcome is not None]
        if not finished:
            what = f"none of {len(stored)} executions is finished" if stored else "no execution was recorded"
            raise ConfigError(what, where=str(self._folder), right="wait for the first one to end")
        if unknown := set(choice.executions) - {e.execution_id for e in stored}:
            raise ConfigError(
                f"unknown execution {min(unknown)}", where="--execution", right="opengyre tree lists them"
            )
        counted.left_out["not finished"] += len(stored) - len(finished)
        kept = []
        for about in self._advantages(finished):
            if why := _why_not(about, choice):
                counted.left_out[why] += 1
            else:
                kept.append(about)
        if not kept:
            reasons = ", ".join(f"{n} {why}" for why, n in counted.left_out.items() if n)
            raise ConfigError(f"no execution is left: {reasons}", where=str(self._folder), right="a wider choice")
        return kept

    def _about(self, stored: StoredExecution) -> About:
        outcome: dict[str, Any] = stored.outcome or {}
        return About(
            execution_id=stored.execution_id,
            query_id=outcome.get("query_id") or stored.meta.get("query_id") or stored.execution_id,
            task_id=outcome.get("task_id") or stored.meta.get("task_id") or "",
            split=stored.meta.get("split", "train"),
            outcome=outcome.get("outcome", ""),
            reward=outcome.get("reward"),
            advantage=outcome.get("advantage"),
        )

    def _advantages(self, finished: list[About]) -> Iterator[About]:
        """As the run took them; else taken anew, from the rewards of each group."""
        groups: dict[tuple[str, str], list[About]] = {}
        for about in finished:
            groups.setdefault((about.split, about.query_id), []).append(about)
        settings = self.config.samples
        anew: dict[str, float | None] = {}
        for members in groups.values():
            rewards = [about.reward for about in members]
            found = group_advantage(rewards, settings.advantage, min_valid=settings.min_valid).advantages
            anew |= {about.execution_id: a for about, a in zip(members, found, strict=True)}
        for about in finished:
            advantage = anew[about.execution_id] if about.advantage is None else about.advantage
            yield About(
                about.execution_id, about.query_id, about.task_id, about.split, about.outcome, about.reward, advantage
            )


def _why_not(about: About, choice: Choice) -> str | None:
    if choice.executions and about.execution_id not in choice.executions:
        return "not asked for"
    if choice.split not in ("all", about.split):
        return f"of the {about.split} split"
    if about.reward is None:
        return None if choice.unscored and choice.min_reward is None else "without a reward"
    if choice.min_reward is not None and about.reward < choice.min_reward:
        return f"below {choice.min_reward}"
    return None
