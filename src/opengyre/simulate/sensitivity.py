"""How much each assumption matters: the hours of every policy with it at both ends of its range, all else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opengyre.simulate.simulator import Simulator
from opengyre.simulate.workload import Assumption, Drawn, Workload


def lines(workload: Workload, policies: Sequence[str], *, seed: int | None = None) -> Iterator[str]:
    """A Markdown table, a line as soon as it is there."""
    head = ["assumption", "value", *(f"{policy}, h" for policy in policies), "long", "timed out"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    yield _row("as it is", "", workload, policies, seed)
    for assumption in workload.assumptions:
        fitted = " (fitted)" if assumption.fitted else ""
        for value in (assumption.low, assumption.high):
            changed = workload.change(**{assumption.key: _typed(workload, assumption, value)})
            yield _row(f"`{assumption.key}`{fitted}", f"{value:g}", changed, policies, seed)


def _typed(workload: Workload, assumption: Assumption, value: float) -> Any:
    here: Any = workload
    for part in assumption.key.split("."):
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    return type(here)(value)


def _row(name: str, value: str, workload: Workload, policies: Sequence[str], seed: int | None) -> str:
    outcomes = [Simulator(workload, Drawn(workload, seed), policy).run() for policy in policies]
    elastic = next((o for o in outcomes if o.policy == "elastic"), outcomes[0])
    cells = [name, value, *(f"{o.hours:.1f}" for o in outcomes)]
    return "| " + " | ".join([*cells, f"{elastic.long_share:.1%}", f"{elastic.long_timeouts:.1%}"]) + " |"
