"""Groups: order, limit, replacement, and what happens when things break."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.errors import EngineError, OpenGyreError
from opengyre.executions.groups import GroupRunner
from opengyre.executions.outcome import ExecutionResult, Outcome
from opengyre.executions.task import Task

TASK = Task("t", "do it", {}, ["true"])


class Script:
    """Runs executions that end when told to; ``outcomes`` gives the outcome by execution id."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.raising: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []
        self.manual = False

    async def __call__(self, execution_id, query_id, task, *, queued_s=0.0):
        self.started.append(execution_id)
        if self.manual:
            gate = self.gates[execution_id] = asyncio.Event()
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(execution_id)
                return ExecutionResult(execution_id, query_id, task.task_id, Outcome.CANCELLED, None)
        if execution_id in self.raising:
            raise self.raising[execution_id]
        outcome = self.outcomes.get(execution_id, Outcome.FINISHED)
        reward = 1.0 if outcome.scored else None
        return ExecutionResult(execution_id, query_id, task.task_id, outcome, reward, queued_s=queued_s)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_members_run_in_order_of_their_queries_and_results_are_in_member_order():
    script = Script()
    groups = GroupRunner(script, group_size=3, infra_retries=0, limit=2)
    assert [groups.submit(0, TASK), groups.submit(1, TASK), groups.submit(7, TASK, size=1, prefix="e")] == [
        "q000000",
        "q000001",
        "e000007",
    ]
    done = [await groups.next_complete() for _ in range(3)]
    expected = [f"q00000{q}-{m:02d}-0" for q in range(2) for m in range(3)]
    assert script.started == [*expected, "e000007-00-0"]
    assert [(q, [r.execution_id for r in results]) for q, results in done] == [
        ("q000000", expected[:3]),
        ("q000001", expected[3:]),
        ("e000007", ["e000007-00-0"]),
    ]


async def test_the_limit_changes_under_way_and_never_touches_what_runs():
    script, levels = Script(), []
    script.manual = True
    groups = GroupRunner(
        script,
        group_size=6,
        infra_retries=0,
        limit=4,
        on_waterlevel=lambda queued, running: levels.append((queued, running)),
    )
    groups.submit(0, TASK)
    await settle()
    assert len(script.started) == 4
    groups.limit = 1
    await settle()
    assert groups.running == 4 and script.cancelled == []
    for name in script.started[:3]:
        script.gates[name].set()
    await settle()
    assert (groups.running, groups.queued, len(script.started)) == (1, 2, 4)
    groups.limit = 3
    await settle()
    assert (groups.running, groups.queued, groups.waterlevel) == (3, 0, 3)
    for gate in script.gates.values():
        gate.set()
    await groups.next_complete()
    await settle()
    assert levels[0] == (2, 4) and levels[-1] == (0, 0) and len(set(levels)) == len(levels)


async def test_completion_order_is_not_submission_order():
    script = Script()
    script.manual = True
    groups = GroupRunner(script, group_size=2, infra_retries=0, limit=8)
    groups.submit(0, TASK)
    groups.submit(1, TASK)
    await settle()
    for name in sorted(script.gates, reverse=True):
        script.gates[name].set()
        await settle()
    assert [(await groups.next_complete())[0] for _ in range(2)] == ["q000001", "q000000"]


async def test_lost_to_infrastructure_is_replaced_in_front_of_the_queue():
    script = Script()
    script.outcomes = {"q000000-00-0": Outcome.INFRA_ABORT, "q000000-00-1": Outcome.INFRA_ABORT}
    queued: list[str] = []
    groups = GroupRunner(
        script, group_size=2, infra_retries=2, limit=1, on_queued=lambda name, query, task, state: queued.append(name)
    )
    groups.submit(0, TASK)
    _, results = await groups.next_complete()
    assert script.started == ["q000000-00-0", "q000000-00-1", "q000000-00-2", "q000000-01-0"]
    assert [r.execution_id for r in results] == ["q000000-00-2", "q000000-01-0"]
    assert queued == ["q000000-00-0", "q000000-01-0", "q000000-00-1", "q000000-00-2"]


@pytest.mark.parametrize("outcome", [Outcome.EVALUATOR_FAILED, Outcome.HARNESS_FAILED, Outcome.TIMED_OUT])
async def test_only_infrastructure_is_replaced(outcome):
    script = Script()
    script.outcomes = {"q000000-00-0": outcome}
    groups = GroupRunner(script, group_size=1, infra_retries=2, limit=1)
    groups.submit(0, TASK)
    assert [r.outcome for r in (await groups.next_complete())[1]] == [outcome]


async def test_C09_every_group_ends_whatever_its_members_do():
    """One raises for good, one is always lost, one is fine, one takes long: four results, the failures marked."""
    script = Script()
    script.raising = {f"q000000-00-{n}": EngineError("gone") for n in range(3)}
    script.outcomes = {f"q000000-01-{n}": Outcome.INFRA_ABORT for n in range(3)}
    groups = GroupRunner(script, group_size=4, infra_retries=2, limit=4)
    groups.submit(0, TASK)
    _, results = await groups.next_complete()
    abort, good = Outcome.INFRA_ABORT, Outcome.FINISHED
    assert [r.outcome for r in results] == [abort, abort, good, good] and "gone" in results[0].detail
    assert groups.waterlevel <= 1


async def test_C10_one_of_128_raises_and_the_others_are_kept():
    script = Script()
    script.raising = {"q000003-05-0": ValueError("bad")}
    groups = GroupRunner(script, group_size=16, infra_retries=0, limit=32)
    for query in range(8):
        groups.submit(query, TASK)
    done = [await groups.next_complete() for _ in range(8)]
    failed = [r for _, results in done for r in results if r.reward is None]
    assert [r.execution_id for r in failed] == ["q000003-05-0"] and "ValueError: bad" in failed[0].detail


async def test_C10_the_death_of_the_machinery_reaches_whoever_waits():
    calls = 0

    def broken(queued: int, running: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("metrics are broken")

    groups = GroupRunner(Script(), group_size=2, infra_retries=0, limit=1, on_waterlevel=broken)
    groups.submit(0, TASK)
    for _ in range(2):  # and stays known
        with pytest.raises(RuntimeError, match="metrics are broken"):
            await asyncio.wait_for(groups.next_complete(), 10)


async def test_close_cancels_what_runs_and_starts_nothing_more():
    script = Script()
    script.manual = True
    groups = GroupRunner(script, group_size=4, infra_retries=2, limit=2)
    groups.submit(0, TASK)
    await settle()
    await groups.close()
    assert script.cancelled == script.started == ["q000000-00-0", "q000000-01-0"]
    assert groups.waterlevel == 0


async def test_a_resumed_query_runs_only_what_is_missing_under_new_ids():
    script = Script()
    groups = GroupRunner(script, group_size=3, infra_retries=0, limit=9)
    known = ExecutionResult("q000004-01-0", "q000004", "t", Outcome.FINISHED, 0.5)
    groups.submit(4, TASK, first_attempt=1, done=[known])
    _, results = await groups.next_complete()
    assert script.started == ["q000004-00-1", "q000004-02-1"]
    assert [r.reward for r in results] == [1.0, 0.5, 1.0]
    all_known = [ExecutionResult(f"q000005-0{m}-0", "q000005", "t", Outcome.FINISHED, 0.5) for m in range(3)]
    groups.submit(5, TASK, done=all_known)
    assert (await groups.next_complete())[0] == "q000005"


async def test_a_query_under_way_cannot_be_submitted_again():
    groups = GroupRunner(Script(), group_size=1, infra_retries=0, limit=0)
    groups.submit(0, TASK)
    with pytest.raises(OpenGyreError, match="q000000"):
        groups.submit(0, TASK)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    limits=st.lists(st.integers(0, 6), max_size=8),
    lost=st.sets(st.integers(0, 30)),
    retries=st.integers(0, 2),
)
def test_every_member_gets_one_result_and_the_limit_holds_for_starts(sizes, limits, lost, retries):
    async def scenario() -> None:
        running, count = 0, 0
        groups: GroupRunner

        async def run(execution_id, query_id, task, *, queued_s=0.0):
            nonlocal running, count
            count += 1
            running += 1
            assert running <= max([2, *limits])
            outcome = Outcome.INFRA_ABORT if count in lost else Outcome.FINISHED
            if limits:
                groups.limit = limits.pop()
            await asyncio.sleep(0)
            running -= 1
            reward = 1.0 if outcome.scored else None
            return ExecutionResult(execution_id, query_id, task.task_id, outcome, reward)

        groups = GroupRunner(run, group_size=1, infra_retries=retries, limit=2)
        for query, size in enumerate(sizes):
            groups.submit(query, TASK, size=size)
        await settle()
        limits.clear()
        groups.limit = 2
        done = dict([await groups.next_complete() for _ in sizes])
        for query, size in enumerate(sizes):
            members = [r.execution_id.split("-")[1] for r in done[f"q{query:06d}"]]
            assert members == [f"{m:02d}" for m in range(size)]
        await groups.close()

    asyncio.run(scenario())
