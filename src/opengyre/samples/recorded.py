"""From run folders to samples without a run: what supervised fine-tuning and rejection sampling start from.

    run folder, …  ── executions that pass Keep ──▶ tree ──▶ the same selection as in RL ──▶ samples of advantage 1

Nothing is tokenised again: ids and masks are the recorded ones, a sampled token is trained once, and what a harness
wrote never is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from opengyre.errors import ConfigError
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store, StoredExecution
from opengyre.record.types import Role
from opengyre.samples.build import build_samples
from opengyre.samples.select import Path as TreePath
from opengyre.samples.select import Picker, by_priority
from opengyre.samples.types import Sample

CALLS = "calls.db"  # in a run folder


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Which executions are taken, and what of them. ``None`` keeps everything."""

    min_reward: float | None = None  # executions without a reward are kept only if this is None
    max_reward: float | None = None
    splits: tuple[str, ...] = ("train",)  # a record that knows no splits counts as "train"
    roles: tuple[Role, ...] = tuple(Role)
    j_max: int = 5  # trajectories per execution, as in ``samples.j_max``
    weight: Literal["execution", "token"] = "execution"  # one voice per execution, or one per sampled token

    def takes(self, execution: StoredExecution) -> bool:
        """True if the execution passes: by split, and by reward where a bound is set."""
        if execution.meta.get("split", "train") not in self.splits:
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        reward = (execution.outcome or {}).get("reward")
        if reward is None:
            return False
        low = -float("inf") if self.min_reward is None else self.min_reward
        high = float("inf") if self.max_reward is None else self.max_reward
        return bool(low <= reward <= high)


class Recorded(msgspec.Struct, frozen=True):
    """One execution that was taken. ``about`` is its task, or its own id where no task is known."""

    execution_id: str
    about: str
    reward: float | None
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        """Trainable tokens."""
        return sum(sample.tokens for sample in self.samples)


def read_recorded(sources: Sequence[Path], keep: Keep, *, seed: int = 0) -> list[Recorded]:
    """The executions of all ``sources`` (run folders, or files of calls) that pass, in the order given.

    Executions of different sources never mix: their ids are prefixed with the source's place in the list.

    Raises:
        ConfigError: a source without a record of calls, or nothing that passes, with what there was.
        RecordError: a record that contradicts itself.
    """
    found: list[Recorded] = []
    seen: list[StoredExecution] = []
    for number, source in enumerate(sources):
        with Store.open(calls_file(source), readonly=True) as store:
            for execution in store.executions():
                seen.append(execution)
                if keep.takes(execution) and (taken := _read(store, execution, keep, f"{number}-", seed)).tokens:
                    found.append(taken)
    if not found:
        raise ConfigError(_nothing(seen, keep), where=", ".join(map(str, sources)))
    return found


def calls_file(source: Path) -> Path:
    """The record of calls in a run folder, or the file itself. Raises ConfigError."""
    file = source / CALLS if source.is_dir() else source
    if not file.is_file():
        what = f"holds no {CALLS}" if source.is_dir() else "no such folder or file"
        raise ConfigError(what, where=str(source), right="a run folder made by opengyre train or collect")
    return file


def _read(store: Store, execution: StoredExecution, keep: Keep, prefix: str, seed: int) -> Recorded:
    tree = store.load_tree(execution.execution_id)
    name, outcome = prefix + execution.execution_id, execution.outcome or {}
    samples = build_samples(
        tree,
        assign_roles(tree),
        execution_id=name,
        query_id=prefix + str(outcome.get("query_id", execution.execution_id)),
        advantage=1.0,
        j_max=keep.j_max,
        run_seed=seed,
        picker=only(keep.roles),
    )
    if keep.weight == "token":
        samples = [msgspec.structs.replace(sample, weight=1.0) for sample in samples]
    return Recorded(name, str(outcome.get("task_id", name)), outcome.get("reward"), samples)


def only(roles: Sequence[Role]) -> Picker:
    """The default picker among paths of ``roles``."""

    def pick(paths: Sequence[TreePath], weights: Sequence[int], random: Random) -> int | None:
        places = [i for i, path in enumerate(paths) if path.role in roles]
        if not places:
            return None
        chosen = by_priority([paths[i] for i in places], [weights[i] for i in places], random)
        return None if chosen is None else places[chosen]

    return pick


def split_off(recorded: Sequence[Recorded], share: float, seed: int) -> tuple[list[Recorded], list[Recorded]]:
    """(for training, held out): about ``share`` of the tasks, at least one where there are several and share > 0.

    Whole tasks are held out, so that what is measured was not seen; which ones depends on their names and the seed.
    """
    tasks = sorted({r.about for r in recorded}, key=lambda task: hashlib.blake2b(f"{seed}/{task}".encode()).digest())
    count = 0 if share <= 0 or len(tasks) < 2 else min(max(1, round(share * len(tasks))), len(tasks) - 1)
    apart = set(tasks[:count])
    return [r for r in recorded if r.about not in apart], [r for r in recorded if r.about in apart]


def batches(recorded: Sequence[Recorded], tokens: int, random: Random) -> Iterator[list[Recorded]]:
    """The executions in random order, in batches of about ``tokens`` trainable ones; an execution is never cut."""
    order = list(recorded)
    random.shuffle(order)
    batch: list[Recorded] = []
    for one in order:
        if batch and sum(r.tokens for r in batch) + one.tokens / 2 > tokens:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _nothing(seen: Sequence[StoredExecution], keep: Keep) -> str:
    rewards = [(e.outcome or {}).get("reward") for e in seen]
    numbers = sorted(r for r in rewards if r is not None)
    range_ = f"rewards from {numbers[0]:g} to {numbers[-1]:g}" if numbers else "none with a reward"
    bound = "" if keep.min_reward is None else f", min reward {keep.min_reward:g}"
    wanted = f"split {' or '.join(keep.splits)}, role {' or '.join(keep.roles)}{bound}"
    return f"no trainable execution passes ({wanted}) of {len(seen)} recorded, {range_}"
