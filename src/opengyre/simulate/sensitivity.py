"""How much each assumption matters: the hours of every policy with it at both ends of its range, all else as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from opengyre.simulate.simulator import Simulator
from opengyre.simulate.workload import Assumption, Drawn, Workload


def lines(workload: Workload, policies: Sequence[str], *, seed: int | None = None) -> Iterator[str]:
    """A Markdown table, a line as soon as it is there.

    Behind the hours stands what the workload's published figures can be compared with: the shares of long queries, and
    ratios to elastic, in brackets where they are outside the published band.
    """
    known = workload.published
    head = ["assumption", "value", *(f"{policy}, h" for policy in policies)]
    head += [f"{policy} / elastic" for policy in known.ratios if policy in policies and "elastic" in policies]
    head += ["long", "timed out"] if known.long_share is not None else []
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
    outcomes = {policy: Simulator(workload, Drawn(workload, seed), policy).run() for policy in policies}
    known, elastic = workload.published, outcomes.get("elastic")
    cells = [name, value, *(f"{o.hours:.1f}" for o in outcomes.values())]
    for policy, (low, high) in known.ratios.items():
        if policy in outcomes and elastic is not None:
            ratio = outcomes[policy].hours / elastic.hours
            cells.append(f"{ratio:.2f}" if low <= ratio <= high else f"({ratio:.2f})")
    if known.long_share is not None:
        shown = elastic or next(iter(outcomes.values()))
        cells += [f"{shown.long_share:.1%}", f"{shown.long_timeouts:.1%}"]
    return "| " + " | ".join(cells) + " |"
