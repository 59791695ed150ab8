"""A trajectory tree like those of long executions: a main line, compactions, sub-agents, a retry and a rewind."""

from __future__ import annotations

import random
from typing import Any

from opengyre.record.roles import assign_roles
from opengyre.samples.build import build_samples
from opengyre.watch.tree_json import trained_masks, tree_to_json
from record_making import Talk

MAIN = {"system_head": "You are a coding agent.", "tool_names": ("bash", "edit"), "tools": "main"}
SUB = {"system_head": "You search the code base.", "tool_names": ("grep",), "tools": "sub"}


def grow(talk: Talk, rng: random.Random, history: list[list[int]], turns: int, **about: Any) -> list[list[int]]:
    """Let ``talk`` go on for some turns; returns the longer history."""
    for turn in range(turns):
        answer = words(rng, rng.randint(20, 180))
        talk.say(history, answer, versions=(3, 4) if turn % 5 == 4 else (3,), **about)
        history = [*history, answer, words(rng, rng.randint(30, 260))]
    return history


def words(rng: random.Random, n: int) -> list[int]:
    """Token ids of a message of ``n`` tokens."""
    return [rng.randint(100, 999) for _ in range(n)]


def tree_json(*, seed: int = 0, turns: int = 9, execution: str = "q7-3-1") -> dict[str, Any]:
    """The tree as the report reads it."""
    rng, talk = random.Random(seed), Talk()
    history = grow(talk, rng, [words(rng, 900), words(rng, 200)], turns, asked_tail="Fix the test", **MAIN)
    for _ in range(2):
        child = grow(talk, rng, [words(rng, 300), words(rng, 80)], rng.randint(3, 5), asked_tail="Find callers", **SUB)
        talk.say([*child, words(rng, 20)], words(rng, 90), asked_tail="Summarize the conversation so far", **SUB)
    summary = words(rng, 240)
    asked = {**MAIN, "asked_tail": "Summarize the conversation so far"}
    talk.say([*history, words(rng, 40)], summary, **asked)
    talk.say(history[:-2], words(rng, 60), delivered=False, asked_tail="Fix the test", **MAIN)  # a retry
    grow(talk, rng, [history[0], summary], turns // 2, asked_tail="Fix the test", **MAIN)
    roles = assign_roles(talk.tree)
    names = {"execution_id": execution, "query_id": execution.rsplit("-", 1)[0]}
    samples = build_samples(talk.tree, roles, advantage=1.2, **names)
    return tree_to_json(
        talk.tree,
        roles,
        trained_masks(samples),
        execution=execution,
        task="train-07",
        outcome="finished",
        reward=1.0,
        decode=lambda ids: " ".join(f"word{i}" for i in ids[:12]),
    )
