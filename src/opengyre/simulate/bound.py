"""What no scheduler can beat, for the work that a run did.

*Work*: every token sampled in full batches, every micro-step, nothing computed twice, nobody idle: work / capacity.

*Path*: endless cells, training in no time. Query j (in admission order) may start when version j // q - s is committed
(s: max_staleness, q: queries per step), takes at least as long as its longest execution takes alone, and the step t is
committed no earlier than (t + 1) q queries are complete:

    F_j = C[j // q - s] + alone_j        C[t] = max(C[t - 1], the (t + 1) q-th smallest F of j < (t + s + 1) q) + commit

Which query is trained in which step is left free, so this holds for every policy. Neither bound can be reached: real
work is lumpy, and the first executions must end before there is anything to train.
"""

from __future__ import annotations

import heapq

from opengyre.simulate.outcome import Outcome
from opengyre.simulate.script import Script
from opengyre.simulate.workload import Source, Workload


def alone_s(script: Script, workload: Workload) -> float:
    """How long an execution takes with a cell for itself."""
    cost, timeout_s = workload.cost, workload.executions.timeout_s
    agent_s = len(script.turns) * workload.host.call_s + sum(
        t.tokens * cost.decode_step_s(1, t.context) + cost.prefill_s(t.prompt_tokens) + t.tool_s for t in script.turns
    )
    if timeout_s is not None:
        agent_s = min(agent_s, timeout_s)
    return script.boot_s + agent_s + script.score_s


def path_hours(workload: Workload, source: Source) -> float:
    """The longest path of a run; see the file."""
    run = workload.run
    q, steps, commit_s = run.queries_per_step, run.steps, workload.cost.commit_s
    commits: list[float] = []
    ends: list[float] = []  # smallest first: of queries admitted so far
    complete: list[float] = []  # the queries that came first, as a heap of the (t + 1) q smallest, largest on top
    admitted = 0
    for step in range(steps):
        while admitted < min(steps * q, (step + run.max_staleness + 1) * q):
            version = admitted // q - run.max_staleness
            start = commits[version - 1] if version > 0 else 0.0
            longest = max(alone_s(script, workload) for script in source.query(admitted))
            heapq.heappush(ends, start + longest)
            admitted += 1
        kth = _take(ends, complete, (step + 1) * q)
        commits.append(max(kth, commits[-1] if commits else 0.0) + commit_s)
    return commits[-1] / 3600


def _take(ends: list[float], complete: list[float], count: int) -> float:
    """Move over from ``ends`` until ``complete`` holds the ``count`` smallest; returns the largest of them."""
    while ends and (len(complete) < count or ends[0] < -complete[0]):
        if len(complete) == count:
            heapq.heappush(ends, -heapq.heappop(complete))
        heapq.heappush(complete, -heapq.heappop(ends))
    return -complete[0]


def bound_hours(outcome: Outcome, workload: Workload, source: Source) -> float:
    """The larger of the two bounds for this run."""
    return max(outcome.work_hours, path_hours(workload, source))
