"""What an execution will do, and how far it has come.

A *script* is fixed before the run: turns of sampling and tool time, drawn from a workload or read from a recorded run.
How long it takes depends on the cells. Executions are sequential: calls that a harness made at once are one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from opengyre.simulate.serving import Engine


class Turn(NamedTuple):
    """One model call, or several in a row taken together: ``tokens`` sampled, ``prompt_tokens`` new to the engine,
    ``context`` read for each sampled token, then ``tool_s`` seconds without the engine."""

    tokens: float
    prompt_tokens: float
    context: float
    tool_s: float


class Script(NamedTuple):
    """One execution: seconds before the first call, turns, seconds of its evaluator, tokens its training runs over."""

    boot_s: float
    turns: tuple[Turn, ...]
    score_s: float
    train_tokens: float


@dataclass(slots=True, eq=False)
class Query:
    """A group under way."""

    query_id: str
    admitted_at: float
    version: int
    left: int
    train_tokens: float = 0.0
    longest_s: float = 0.0  # active time of the execution that took longest
    timed_out: bool = False  # did that one


@dataclass(slots=True, eq=False)
class Execution:
    """One execution under way. ``cached``: the engine and its epoch that hold its prefix."""

    name: str
    query: Query
    script: Script
    started: float = -1.0
    turn: int = 0
    tokens_left: float = 0.0
    context: float = 0.0
    end_step: float = 0.0
    engine: Engine | None = None
    cached: tuple[Engine, int] | None = None
    held_since: float = -1.0
    held_s: float = 0.0
    over: bool = False
    timed_out: bool = False

    def active_s(self, now: float, *, pauses: bool) -> float:
        """Seconds its deadline has run: since its start, less what it was held if the deadline pauses then."""
        held = self.held_s + (now - self.held_since if self.held_since >= 0 else 0.0)
        return now - self.started - (held if pauses else 0.0)
