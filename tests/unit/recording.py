"""A recorded run folder, made from plain lists of tokens."""

from __future__ import annotations

import random
from pathlib import Path

from opengyre.record.store import Store
from record_making import Talk

REWARDS: list[float | None] = [0.0, 0.25, 0.5, None, 1.0]  # of e0 to e4; e3 was never scored
VOCABULARY = 60


def talk(seed: int, turns: int = 3) -> Talk:
    """One execution: a common prompt, then turns of its own."""
    rng, made = random.Random(seed), Talk()
    history = [[7, 8, 9, 10, 11, 12], words(rng)]
    for _ in range(turns):
        answer = words(rng)
        made.say(history, answer)
        history = [*history, answer, words(rng)]
    return made


def words(rng: random.Random) -> list[int]:
    return [rng.randrange(10, VOCABULARY) for _ in range(rng.randint(3, 9))]


def record_run(folder: Path) -> Path:
    """``folder/calls.db`` with the held-out execution ``a0`` (reward 1) and the training ones ``e0``, ``e1``, …"""
    folder.mkdir(parents=True, exist_ok=True)
    with Store.open(folder / "calls.db") as store:
        named = [("a0", "held_out", 1.0), *((f"e{n}", "train", reward) for n, reward in enumerate(REWARDS))]
        for seed, (name, split, reward) in enumerate(named):
            store.begin_execution(name, {"split": split})
            for call in talk(seed).made:
                store.put(name, call)
            store.finish_execution(name, {"task_id": f"task-{seed}", "query_id": f"q{seed}", "reward": reward})
    return folder
