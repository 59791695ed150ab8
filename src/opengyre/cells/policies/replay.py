"""Decisions, taken again from the log: every ``decision`` event holds the snapshot it was made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from opengyre.cells.policies import make_policy
from opengyre.cells.policies.base import Action, Decision, Policy, Snapshot
from opengyre.config import RunConfig


class Difference(msgspec.Struct, frozen=True):
    """A decision that the policy would not take from the snapshot it was logged with."""

    t: float
    logged: list[Action]
    decided: Decision


def replay_decisions(config: RunConfig, events: Iterable[dict[str, Any]]) -> tuple[int, list[Difference]]:
    """Decide again from the log of a live or simulated run; returns how many decisions there are, and the differences.

    Logged are the actions that were begun: a cell that was on its way makes them fewer than decided, never more.
    """
    policies: dict[str, Policy] = {}
    count, differences = 0, []
    for event in events:
        if event.get("kind") != "decision":
            continue
        name = event["policy"]
        policy = policies.setdefault(name, make_policy(config, name))
        decided = policy.decide(msgspec.convert(event["snapshot"], Snapshot))
        logged = msgspec.convert(event["actions"], list[Action])
        count += 1
        same = event["reason"] == decided.reason and event.get("admit") == decided.admit
        if not same or any(action not in decided.actions for action in logged):
            differences.append(Difference(event["t"], logged, decided))
    return count, differences
