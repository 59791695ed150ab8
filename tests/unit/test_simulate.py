"""The simulator: runs end under every policy, keep the staleness bound, are the same again, and count what they did."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.cells.policies import POLICIES
from opengyre.cells.policies.base import Decision, Snapshot
from opengyre.cells.policies.replay import replay_decisions
from opengyre.config import RunConfig
from opengyre.errors import ConfigError
from opengyre.simulate.bound import path_hours
from opengyre.simulate.compare import compare, table
from opengyre.simulate.cost import CostModel
from opengyre.simulate.outcome import Outcome
from opengyre.simulate.plan import Choice, choices, plan
from opengyre.simulate.recorder import Recorder
from opengyre.simulate.script import Execution, Query, Script, Turn
from opengyre.simulate.sensitivity import lines
from opengyre.simulate.serving import Engine
from opengyre.simulate.simulator import SimulationError, Simulator
from opengyre.simulate.trace import UNLIMITED, Played, Recorded
from opengyre.simulate.workload import Drawn, Workload, build, capped_mean, load_workload, shipped
from opengyre.watch.figures import figures


def small(**changes) -> Workload:
    """4 cells of 8 slots, 4 steps of 3 queries of 4 executions of about 6 minutes."""
    workload = build(
        {
            "name": "small",
            "about": "",
            "cluster": {"cells": 4, "slots": 8},
            "run": {"steps": 4, "queries_per_step": 3, "group_size": 4, "max_staleness": 1, "tick_s": 1.0},
            "executions": {"median_h": 0.1, "sigma": 0.6, "timeout_h": 0.4, "turns": 4, "boot_s": 1.0, "score_s": 2.0},
            "training": {"cell_hours_per_step": 0.05, "micro_steps_per_group": 4},
            "policies": {"async": {"train_cells": 1}, "lend": {"train_cells": 1}},
        }
    )
    return workload.change(**changes)


def run(workload: Workload, policy: str, recorder: Recorder | None = None, seed: int = 0) -> Outcome:
    """One run."""
    return Simulator(workload, Drawn(workload), policy, recorder=recorder, seed=seed).run()


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("carry_over", [False, True])
def test_a_run_ends_with_every_query_trained_once_within_the_bound(policy: str, carry_over: bool) -> None:
    workload = small(**{"policies.colocate.carry_over": carry_over})
    recorder = Recorder()
    outcome = run(workload, policy, recorder)
    assert outcome.steps == 4
    assert outcome.staleness_max <= 1
    states = Counter((e["query"], e["state"]) for e in recorder.events if e["kind"] == "query")
    assert set(states.values()) == {1}  # admitted once, complete once
    done = [e["execution"] for e in recorder.events if e["kind"] == "execution" and e["state"] == "done"]
    assert len(done) == len(set(done)) >= 4 * 3 * 4
    assert 0 < outcome.efficiency <= 1
    assert outcome.hours >= path_hours(workload, Drawn(workload))
    assert outcome.hours >= outcome.work_hours


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run_and_every_decision_replays_from_its_log(policy: str) -> None:
    first, second = Recorder(), Recorder()
    assert run(small(), policy, first) == run(small(), policy, second)
    assert first.events == second.events
    count, differences = replay_decisions(small().run_config(policy), first.events)
    assert differences == []
    assert count > 0 or policy == "lend"


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    cells=st.integers(2, 6),
    slots=st.integers(1, 12),
    staleness=st.integers(0, 3),
    queries=st.integers(1, 4),
    sigma=st.floats(0, 1.5),
    mtbf=st.sampled_from([0.0, 0.3]),
    pauses=st.booleans(),
    carry=st.booleans(),
    cores=st.sampled_from([0.0, 2.5]),
    seed=st.integers(0, 99),
)
def test_any_run_ends_and_no_policy_breaks_the_bound(
    policy: str, cells: int, slots: int, staleness: int, queries: int, sigma: float, mtbf: float, pauses: bool,
    carry: bool, cores: float, seed: int,
) -> None:  # fmt: skip
    """Cells that die among it: claims and calls they had come back, the core's sums are made anew."""
    workload = small(
        **{
            "seed": seed,
            "cluster.cells": cells,
            "cluster.slots": slots,
            "cluster.cell_mtbf_h": mtbf,
            "cost.restart_s": 60.0,
            "run.max_staleness": staleness,
            "run.queries_per_step": queries,
            "executions.sigma": sigma,
            "executions.timeout_pauses": pauses,
            "host": {"cores": cores, "harness_cores": 0.1, "call_s": 0.5},
            "policies": {"colocate": {"carry_over": carry}},
        }
    )
    outcome = run(workload, policy, seed=seed)
    assert (outcome.steps, outcome.staleness_max <= staleness) == (4, True)
    assert outcome.hours >= outcome.work_hours * 0.999


def test_failures_cost_time_and_nothing_else() -> None:
    whole, broken = (run(small(**{"cluster.cell_mtbf_h": mtbf}), "elastic") for mtbf in (0.0, 0.5))
    assert broken.failures > 0
    assert broken.steps == whole.steps
    assert broken.hours > whole.hours
    lost = run(small(**{"cluster.lost_at_h": {"satellite-1": [0.05], "core": [0.1]}}), "elastic")
    assert (lost.failures, lost.steps) == (2, whole.steps)
    assert lost.hours > whole.hours
    with pytest.raises(ConfigError, match=r"cluster\.lost_at_h"):
        run(small(**{"cluster.lost_at_h": {"core": [-1.0]}}), "elastic")


class NeverBack:
    """Sends the core away for good."""

    name, moves_core = "never-back", True

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Everybody rolls out."""
        from opengyre.cells.policies.base import Action

        return Decision([Action(c.name, "rollout") for c in snapshot.training()], "away")


def test_a_policy_that_keeps_the_core_away_is_an_error_that_says_where() -> None:
    with pytest.raises(SimulationError, match=r"never-back at step 1.*brings the core back"):
        run(small(), f"{__name__}:NeverBack")


# -- policies ---------------------------------------------------------------------------------------------------------


def test_elastic_plus_is_faster_than_elastic_and_both_than_a_barrier() -> None:
    workload = small(**{"run.max_staleness": 2, "training.cell_hours_per_step": 0.15, "run.steps": 8})
    hours = {  # over a few draws: on a single one chance is worth a percent
        policy: sum(Simulator(workload, Drawn(workload, seed), policy).run().hours for seed in range(4))
        for policy in ("elastic-plus", "elastic", "colocate")
    }
    assert hours["elastic-plus"] < hours["elastic"] < hours["colocate"]


def test_carrying_over_makes_a_barrier_cheaper() -> None:
    workload = small(**{"run.max_staleness": 2, "run.steps": 8})
    hours = [run(workload.change(**{"policies.colocate.carry_over": c}), "colocate").hours for c in (True, False)]
    assert hours[0] < hours[1]


def test_a_barrier_without_carry_over_is_never_stale() -> None:
    assert run(small(**{"run.max_staleness": 3}), "colocate").staleness_max == 0


def test_a_time_out_that_pauses_while_a_call_is_held_strikes_less_often() -> None:
    held = small(**{"policies.colocate.carry_over": True, "training.cell_hours_per_step": 1.0, "run.max_staleness": 2})
    running, paused = (run(held.change(**{"executions.timeout_pauses": p}), "colocate") for p in (False, True))
    assert paused.timeouts < running.timeouts


# -- one cell ---------------------------------------------------------------------------------------------------------


def execution(tokens: float, context: float = 0.0) -> Execution:
    """One call to be made."""
    e = Execution("e", Query("q", 0.0, 0, 1), Script(0.0, (Turn(tokens, 0.0, context, 0.0),), 0.0, 0.0))
    e.tokens_left, e.context = tokens, context
    return e


def test_calls_share_an_engine_step_by_step() -> None:
    """Steps of 1 s + 1 s per call: alone 10 tokens take 20 s; with a second call from 10 s on, 5 s more."""
    engine = Engine(CostModel(decode_base_s=1.0, decode_call_s=1.0, prefill_tokens_per_s=10.0), slots=4)
    first, second = execution(10), execution(2)
    engine.add(0.0, first, 0.0)
    assert engine.next_end() == pytest.approx(20)
    engine.add(10.0, second, 0.0)  # 5 tokens done; now a step takes 3 s
    assert engine.next_end() == pytest.approx(16)
    assert engine.pop_ended(15.9) is None
    assert engine.pop_ended(16.0) is second
    assert engine.next_end() == pytest.approx(22)  # 3 tokens of 2 s
    engine.stall(4.0)
    assert engine.next_end() == pytest.approx(26)
    engine.remove(24.0, first)  # stalled from 16 to 20, two tokens since
    assert (first.tokens_left, engine.calls, engine.next_end()) == (pytest.approx(1), 0, None)
    assert engine.sampled == pytest.approx(11)


def test_a_prefill_stops_the_whole_batch_and_context_slows_it() -> None:
    engine = Engine(CostModel(decode_base_s=1.0, decode_context_s=0.5, prefill_tokens_per_s=10.0), slots=4)
    engine.add(0.0, execution(1, context=2000), 50.0)
    assert engine.next_end() == pytest.approx(5 + 1 + 0.5 * 2)


# -- workloads --------------------------------------------------------------------------------------------------------


def test_the_mean_of_a_capped_log_normal() -> None:
    import numpy as np

    draws = np.minimum(1.26 * np.exp(0.76 * np.random.default_rng(0).standard_normal(400_000)), 6.0)
    assert capped_mean(1.26, 0.76, 6.0) == pytest.approx(draws.mean(), rel=0.005)
    assert capped_mean(2.0, 0.0, 1.5) == 1.5


def test_an_execution_alone_on_full_cells_takes_its_duration() -> None:
    """One query on one cell whose slots it fills: its executions take what was drawn, give or take the batch's end."""
    workload = small(
        **{
            "cluster.cells": 2,
            "cluster.slots": 4,
            "run.queries_per_step": 1,
            "run.steps": 1,
            "run.max_staleness": 0,
            "executions.sigma": 0.0,
            "executions.timeout_h": None,
            "executions.model_share": 1.0,
        }
    )
    outcome = run(workload, "elastic")
    assert outcome.query_hours_median == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"cluster.cells": 0}, "cluster.cells"),
        ({"run.max_staleness": -1}, "run.max_staleness"),
        ({"executions.within_query": 1.5}, "executions.within_query"),
        ({"cost.prefill_tokens_per_s": 0.0}, "cost.prefill_tokens_per_s"),
        ({"cluster.slotz": 3}, "cluster"),
        ({"name.x": 3}, "name.x"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        small(**change)
    assert where in str(error.value)


def test_every_shipped_workload_loads_and_names_its_assumptions() -> None:
    assert "qwen3.8-2.4t" in shipped()
    for name in shipped():
        workload = load_workload(name)
        assert workload.name == name
        assert workload.assumptions
        for assumption in workload.assumptions:
            workload.change(**{assumption.key: type_of(workload, assumption.key)(assumption.low)})
    with pytest.raises(ConfigError, match=r"qwen3\.8-2\.4t"):
        load_workload("nope")


def type_of(workload: Workload, key: str) -> type:
    """Of the value of a key."""
    here = workload
    for part in key.split("."):
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    return type(here)


# -- output -----------------------------------------------------------------------------------------------------------


def test_a_simulated_run_has_the_report_of_a_live_one(tmp_path) -> None:
    rows = compare(small(), ["elastic"], folder=tmp_path)
    assert (tmp_path / "elastic" / "report.html").stat().st_size > 10_000
    recorder = Recorder()
    outcome = run(small(), "elastic", recorder)
    shown = figures(recorder.events)
    assert shown["run"]["wall_s"] == pytest.approx(outcome.hours * 3600, abs=0.01)
    assert shown["totals"]["executions"] == outcome.executions
    assert len(shown["steps"]) == 4
    assert sum(lane["micro_steps"] for lane in shown["cells"]) > 0
    assert rows[0].plain().keys() >= {"policy", "hours", "steps", "timeouts", "efficiency", "bound_hours"}
    assert table(rows)[1].startswith("elastic")


def test_a_plan_finds_that_more_cells_are_faster_and_dearer() -> None:
    tried = choices(small(), policies=["elastic"], cells=[2, 6], slots=[8], staleness=[2])
    assert [c.cells for c in tried] == [2, 6]
    fast = plan(small(), tried, objective="time", seeds=2)
    cheap = plan(small(), tried, objective="gpu-hours", seeds=2)
    assert (fast[0].choice.cells, cheap[0].choice.cells) == (6, 2)
    assert fast[0].step_hours[1] <= fast[0].step_hours[0] <= fast[0].step_hours[2]
    splits = [c.train_cells for c in choices(small(), policies=["async"], cells=[4], slots=[8], staleness=[1])]
    assert splits == [0, 1, 2]


def test_a_plan_over_trajectories_needs_to_know_what_they_cost() -> None:
    with pytest.raises(ConfigError, match="by_j_max"):
        choices(small(), j_max=["1"])
    with pytest.raises(ConfigError, match=r"training\.j_max"):
        small(**{"training.j_max": "2"})
    published = load_workload("qwen3.8-2.4t")
    with pytest.raises(ConfigError, match="1, 5, unlimited"):
        choices(published, j_max=["3"])
    fewer = Choice(policy="elastic", cells=4, slots=150, max_staleness=4, j_max="1").apply(published)
    assert fewer.step_tokens == pytest.approx(published.step_tokens * 0.553)
    assert fewer.micro_step_tokens == pytest.approx(published.micro_step_tokens)  # fewer micro-steps, not smaller ones
    assert Drawn(fewer).query(0)[0].train_tokens == pytest.approx(Drawn(published).query(0)[0].train_tokens * 0.553)


def test_each_j_max_has_its_own_best_and_finalists_are_compared_draw_by_draw() -> None:
    training = {"training.by_j_max": {"1": 0.4, "5": 1.0}, "training.cell_hours_per_step": 0.3}
    tried = choices(small(**training), policies=["elastic"], cells=[2, 4], slots=[8], staleness=[1])
    assert [(c.j_max, c.cells) for c in tried] == [("1", 2), ("1", 4), ("5", 2), ("5", 4)]
    found = plan(small(**training), tried, seeds=3)
    assert [(p.choice.j_max, p.choice.cells) for p in found] == [("1", 4), ("1", 2), ("5", 4), ("5", 2)]
    assert [p.ratio == (1.0, 1.0, 1.0) for p in found] == [True, False, True, False]
    slower, best = found[1], found[0]
    ratios = [a / b for a, b in zip(slower.by_seed, best.by_seed, strict=True)]
    assert slower.ratio == pytest.approx((sum(ratios) / 3, min(ratios), max(ratios)))
    assert found[2].step_hours[0] > best.step_hours[0]
    cheap = plan(small(**training), tried, seeds=3, objective="gpu-hours")
    ends = [(p.choice.cells, p.ratio[0] >= 1) for p in cheap if p.choice.j_max == "1"]
    assert ends == [(2, True), (4, True)]


def test_a_recorded_run_trains_what_its_j_max_picks() -> None:
    """Tokens of one, two, three trajectories of each execution; a group that trained nothing."""
    script = Script(1.0, (Turn(10.0, 5.0, 100.0, 1.0),), 1.0, 0.0)
    groups = [[Played(script, (60.0, 90.0, 100.0)), Played(script, (40.0,))], [Played(script), Played(script)]]
    recorded = Recorded(groups, "2")
    assert [one.train_tokens for one in recorded.query(0)] == [90.0, 40.0]
    assert [one.train_tokens for one in recorded.query(1)] == [0.0, 0.0]
    known = recorded.by_j_max()
    assert known == {"1": pytest.approx(100 / 130), "2": 1.0, "3": pytest.approx(140 / 130), UNLIMITED: known["3"]}
    workload = small(**{"training.by_j_max": known, "training.j_max": UNLIMITED, "training.micro_step_tokens": 50.0})
    assert [one.train_tokens for one in recorded.drawn(workload, None).query(0)] == [100.0, 40.0]
    outcome = Simulator(workload, recorded.drawn(workload, 0), "elastic").run()
    assert outcome.steps == 4


def test_a_table_of_assumptions_shows_what_published_bands_refute() -> None:
    assumption = {"key": "run.queries_per_step", "low": 2.0, "high": 4.0, "fitted": True, "why": "a guess"}
    workload = small(assumptions=[assumption], **{"published.ratios": {"async": (5.0, 9.0), "elastic": (1.0, 1.0)}})
    head, _, *rows = lines(workload, ["elastic", "async"])
    assert head == "| assumption | value | elastic, h | async, h | async / elastic | elastic / elastic |"
    assert [row.split(" | ")[1] for row in rows] == ["", "2", "4"]
    assert all("`run.queries_per_step` (fitted)" in row for row in rows[1:])
    assert all(" | (" in row and row.endswith(" | 1.00 |") for row in rows)
    assert next(lines(workload, ["async"])) == "| assumption | value | async, h |"
