"""elastic-plus and the survival estimate it looks at; colocate's carry-over; decisions taken again from the log."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from opengyre.cells.measured import Measured
from opengyre.cells.policies import make_policy
from opengyre.cells.policies import survival as survival_module
from opengyre.cells.policies.base import SoFar, wants_outlook
from opengyre.cells.policies.replay import replay_decisions
from opengyre.cells.policies.survival import Outlook, Survival
from opengyre.cells.state import CellState
from opengyre.simulate.recorder import Recorder
from opengyre.simulate.simulator import Simulator
from opengyre.simulate.workload import Drawn, load_workload
from test_cells_policies import ROLLOUT, TRAINING, cells, config, moves, see

# -- elastic-plus -----------------------------------------------------------------------------------------------------


def plus():
    """The policy, 3 satellites of 4 slots, a switch pair of 1 s, steps that overlap."""
    return make_policy(config("elastic-plus", max_staleness=2))


def test_idle_trainers_roll_out_when_the_next_group_is_far_the_core_last() -> None:
    views = cells(TRAINING, ROLLOUT, ROLLOUT)
    idle = see(views, running=3, next_group_s=60.0)
    assert moves(plus(), idle) == {"s1": "rollout"}  # one cell per execution is the most that helps
    assert moves(plus(), msgspec.structs.replace(idle, running=4)) == {"s1": "rollout", "core": "rollout"}
    assert moves(plus(), msgspec.structs.replace(idle, running=4, step_full=True)) == {"s1": "rollout"}
    assert moves(plus(), msgspec.structs.replace(idle, next_group_s=2.9)) == {}  # not much is gained before it comes
    unserved = msgspec.structs.replace(idle, running=8, queued=1)
    assert moves(plus(), msgspec.structs.replace(unserved, next_group_s=1.1)) == {"s1": "rollout"}
    assert moves(plus(), msgspec.structs.replace(unserved, next_group_s=0.9)) == {}  # sooner than a switch pays
    assert moves(plus(), msgspec.structs.replace(idle, claimed_micro_steps=1)) == {}
    assert moves(plus(), msgspec.structs.replace(idle, running=0)) == {}


def test_trainers_stay_for_groups_that_are_ready_if_the_commit_is_shorter_than_a_switch() -> None:
    full = see(cells(TRAINING, ROLLOUT, ROLLOUT), running=4, next_group_s=60.0, step_full=True, ready_groups=2)
    assert moves(plus(), msgspec.structs.replace(full, commit_s=0.9)) == {}
    assert moves(plus(), msgspec.structs.replace(full, commit_s=1.1)) == {"s1": "rollout"}
    assert moves(plus(), full) == {}  # not known
    queued = msgspec.structs.replace(full, commit_s=0.9, running=8, queued=1)
    assert moves(plus(), queued) == {"s1": "rollout"}  # who waits for a slot waits longer than a micro-step does


def test_without_an_estimate_only_executions_without_a_slot_count() -> None:
    views = cells(TRAINING, ROLLOUT, ROLLOUT)
    assert moves(plus(), see(views, running=8)) == {}  # missing is not far away
    assert moves(plus(), see(views, running=8, queued=1)) == {"s1": "rollout"}


def test_the_core_comes_back_when_there_is_work_and_at_once_when_the_step_is_full() -> None:
    away = cells(ROLLOUT, ROLLOUT, ROLLOUT, core=ROLLOUT)
    assert moves(plus(), see(away, running=9, claimable_micro_steps=1)) == {"core": "train"}
    fresh = cells(ROLLOUT, ROLLOUT, ROLLOUT, core=ROLLOUT, since=99.0)
    assert moves(plus(), see(fresh, running=9, claimable_micro_steps=1)) == {}  # cooling down
    assert moves(plus(), see(fresh, running=9, step_full=True)) == {"core": "train"}
    alone = cells(TRAINING, TRAINING, TRAINING, core=ROLLOUT)
    full = see(alone, running=1, step_full=True)
    assert moves(plus(), full) == {"s1": "rollout"}  # somebody must serve first, and nobody else would come
    assert moves(make_policy(config("elastic-plus", max_staleness=1)), full) == {"s1": "rollout"}
    relieved = see(cells(CellState.PULLING, TRAINING, TRAINING, core=ROLLOUT), running=1, step_full=True)
    assert moves(plus(), relieved) == {}  # it is coming
    assert moves(plus(), see(cells(ROLLOUT, TRAINING, TRAINING, core=ROLLOUT), running=1, step_full=True)) == {
        "core": "train"
    }


def test_the_cell_with_the_least_kv_goes_and_unknown_is_much() -> None:
    views = cells(ROLLOUT, ROLLOUT, ROLLOUT)
    kv = [None, None, 5000, 900]
    views = [msgspec.structs.replace(v, kv_tokens=k) for v, k in zip(views, kv, strict=True)]
    assert moves(plus(), see(views, running=4, claimable_micro_steps=9)) == {"s3": "train"}


def test_queries_are_admitted_when_their_executions_find_a_slot() -> None:
    views = cells(ROLLOUT, ROLLOUT, TRAINING)
    full = see(views, running=8, admissible_queries=5, claimable_micro_steps=1)
    assert plus().decide(full).admit == 0
    assert plus().decide(msgspec.structs.replace(full, running=3)).admit == 2  # 5 slots, groups of 4: rounded up
    assert plus().decide(msgspec.structs.replace(full, claimable_micro_steps=0)).admit == 2  # trainers will serve


def test_where_steps_do_not_overlap_the_waterlevel_rule_stands_and_the_core_helps_a_queue() -> None:
    policy, elastic = make_policy(config("elastic-plus", max_staleness=1)), make_policy(config(max_staleness=1))
    for level in range(0, 16, 3):
        for work in (0, 5):
            for views in (cells(ROLLOUT, ROLLOUT, TRAINING), cells(TRAINING, TRAINING, ROLLOUT)):
                s = see(views, running=level, claimable_micro_steps=work, step_groups=1)
                assert policy.decide(s) == elastic.decide(s)
    full = see(cells(ROLLOUT, ROLLOUT, ROLLOUT), queued=2, running=12, next_group_s=60.0)
    assert moves(policy, full) == {"core": "rollout"}
    tail = msgspec.structs.replace(full, queued=0)
    assert moves(policy, tail) == {"core": "rollout"}
    assert moves(policy, msgspec.structs.replace(tail, next_group_s=2.9)) == {}  # not much is gained before it comes
    assert moves(policy, msgspec.structs.replace(full, next_group_s=2.9)) == {"core": "rollout"}
    assert moves(policy, msgspec.structs.replace(tail, running=3)) == {}  # a cell for each is there
    assert moves(policy, msgspec.structs.replace(tail, training_cells=3.0)) == {}
    assert moves(policy, msgspec.structs.replace(full, next_group_s=None)) == {}  # missing is not far away
    assert moves(policy, msgspec.structs.replace(full, ready_groups=1)) == {}


def test_what_a_commit_takes_is_measured_from_its_last_micro_step_to_the_next_step() -> None:
    measured, step = Measured(), SimpleNamespace(complete=False)
    measured.see(step, 1.0)
    step.complete = True
    measured.see(step, 2.0)
    measured.see(step, 3.0)  # nothing new
    assert (measured.commit_s, measured.switch_cost_s) == (None, None)
    measured.see(None, 4.0)
    measured.opened(4.5)
    measured.opened(9.0)  # a run's first step follows no commit
    measured.switched(0.25)
    assert (measured.commit_s, measured.switch_cost_s, measured.switches) == (2.5, 0.25, 1)


# -- colocate ---------------------------------------------------------------------------------------------------------


def test_colocate_with_carry_over_trains_as_soon_as_the_step_is_full() -> None:
    policy = make_policy(config("colocate", carry_over=True))
    rolling = cells(ROLLOUT, ROLLOUT, core=ROLLOUT)
    assert moves(policy, see(rolling, running=5, claimable_micro_steps=9)) == {}
    everybody = dict.fromkeys(("core", "s1", "s2"), "train")
    assert moves(policy, see(rolling, running=5, claimable_micro_steps=9, step_full=True)) == everybody
    training = cells(TRAINING, TRAINING)
    assert moves(policy, see(training, running=5)) == dict.fromkeys(("core", "s1", "s2"), "rollout")
    assert policy.decide(see(rolling, running=5)).admit is None


def test_colocate_without_it_starts_only_the_queries_of_its_step() -> None:
    policy = make_policy(config("colocate"))
    rolling = cells(ROLLOUT, ROLLOUT, core=ROLLOUT)
    assert policy.decide(see(rolling, admissible_queries=4)).admit == 2  # of 2 a step
    assert policy.decide(see(rolling, admissible_queries=4, unfinished_groups=1, running=4)).admit == 1
    done = see(rolling, admissible_queries=2, step_groups=2, step_full=True, claimable_micro_steps=3)
    assert policy.decide(done).admit == 0  # the next step's would be stale
    assert moves(policy, done) == dict.fromkeys(("core", "s1", "s2"), "train")


# -- what policies are told -------------------------------------------------------------------------------------------


def test_an_outlook_is_near_what_happens() -> None:
    """Groups of 16 log-normal executions just started: the median until the first of 30 is over, and the 16th."""
    random = np.random.default_rng(0)
    survival = Survival()
    for number, seconds in enumerate(random.lognormal(np.log(4000), 0.7, 2000).tolist()):
        survival.started(f"old{number}", "old", 0.0)
        survival.ended(f"old{number}", "old", seconds)
    for group in range(30):
        for member in range(16):
            survival.started(f"{group}-{member}", f"q{group}", 0.0)
    outlook = survival.outlook(0.0, 16)
    really = np.sort(random.lognormal(np.log(4000), 0.7, (2000, 30, 16)).max(axis=2), axis=1)
    assert outlook.next_group_s == pytest.approx(np.median(really[:, 0]), rel=0.1)
    assert outlook.step_eta_s == pytest.approx(np.mean(really[:, 15]), rel=0.1)
    later = survival.outlook(6000.0, 16)
    assert later.next_group_s is not None
    assert later.next_group_s < outlook.next_group_s  # they have aged


def test_what_was_not_measured_is_none() -> None:
    survival = Survival()
    survival.started("a", "q", 0.0)
    assert survival.outlook(1.0, 1) == Outlook(None, None)
    for number in range(8):
        survival.started(f"e{number}", "p", 0.0)
        survival.ended(f"e{number}", "p", 5.0, counts=False)  # lost to infrastructure: says nothing
    assert survival.outlook(1.0, 1) == Outlook(None, None)


def test_places_are_used_again() -> None:
    survival = Survival()
    for number in range(5000):
        survival.queued(f"e{number}", f"q{number // 4}")
        survival.started(f"e{number}", f"q{number // 4}", float(number))
        if number >= 8:
            survival.ended(f"e{number - 8}", f"q{(number - 8) // 4}", number + 1.0)
    assert len(survival._start) == 64
    assert survival.outlook(5001.0, 1).next_group_s is not None


def test_idle_steps_count_once_a_step_and_only_after_its_first_group() -> None:
    idle, waits = SoFar(), see(cells(TRAINING, ROLLOUT), step_groups=1)
    assert idle.note(msgspec.structs.replace(waits, step_groups=0)).trainer_idle_steps == 0
    assert [idle.note(waits).trainer_idle_steps for _ in range(3)] == [1, 1, 1]
    assert idle.note(msgspec.structs.replace(waits, version=4, claimable_micro_steps=1)).trainer_idle_steps == 1
    assert idle.note(msgspec.structs.replace(waits, version=4)).trainer_idle_steps == 2


def test_how_many_cells_training_is_worth_is_told_from_what_they_did() -> None:
    """Of 4 cells, a quarter of the work is training: one. Nothing is said before a step was committed."""
    so_far, at = SoFar(), see(cells(TRAINING, ROLLOUT, ROLLOUT), running=6, claimed_micro_steps=1, now=0.0)
    after = [
        so_far.note(msgspec.structs.replace(at, **more)).training_cells
        for more in (
            {},
            {"now": 10.0},  # 10 cell seconds of a trainer, 6 of 4 slots: 15 of rollout
            {"now": 10.0, "version": 4},
            {"now": 30.0, "version": 4, "claimed_micro_steps": 0},
            {"now": 40.0, "version": 4, "running": None},
        )
    ]
    assert after[:2] == [None, None]
    assert after[2] == pytest.approx(4 * 10 / 25)
    train, rollout = 10 * 0.8 + 20, 15 * 0.8 + 30  # what came before a commit counts less
    assert after[3] == pytest.approx(4 * train / (train + rollout))
    assert after[4] == pytest.approx(4 * train / (train + rollout + 15))


def test_where_training_is_worth_several_cells_the_waterlevel_rule_stands() -> None:
    elastic = make_policy(config(max_staleness=2))
    for views in (cells(TRAINING, ROLLOUT, ROLLOUT), cells(TRAINING, TRAINING, ROLLOUT)):
        far = see(views, running=3, next_group_s=60.0, step_groups=1, training_cells=2.6)
        assert plus().decide(far) == elastic.decide(far)
        assert moves(plus(), msgspec.structs.replace(far, training_cells=2.4))
        assert moves(plus(), msgspec.structs.replace(far, training_cells=None))  # missing is not many
    full = see(cells(ROLLOUT, ROLLOUT, ROLLOUT), queued=2, running=12, next_group_s=60.0, training_cells=3.0)
    assert moves(plus(), full) == {"core": "rollout"}


def test_only_policies_that_ask_pay_for_an_outlook() -> None:
    assert {name: wants_outlook(make_policy(config(name))) for name in ("elastic", "elastic-plus", "lend")} == {
        "elastic": False,
        "elastic-plus": True,
        "lend": True,
    }


def test_a_logged_decision_that_the_policy_would_not_take_is_found() -> None:
    snapshot = see(cells(ROLLOUT, ROLLOUT, CellState.DRAINING), running=1, claimable_micro_steps=9)
    decided = plus().decide(snapshot)
    event = {
        "t": 1.0,
        "kind": "decision",
        "policy": "elastic-plus",
        "actions": msgspec.to_builtins(decided.actions),
        "reason": decided.reason,
        "admit": decided.admit,
        "snapshot": msgspec.to_builtins(snapshot),
    }
    through_json = msgspec.json.decode(msgspec.json.encode(event))
    assert replay_decisions(config(max_staleness=2), [through_json, {"kind": "note"}]) == (1, [])
    other = {**event, "actions": [{"cell": "s2", "role": "train"}]}
    count, differences = replay_decisions(config(max_staleness=2), [event, other])
    assert (count, [d.logged[0].cell for d in differences]) == (2, ["s2"])


class FromScratch:
    """``Survival`` as it is defined: every age and every chance is worked out for each outlook."""

    def __init__(self) -> None:
        self.over: np.ndarray = np.zeros(len(survival_module._EDGES))
        self.groups: dict[str, dict[str, float | None]] = {}
        self.known, self.made, self.about = Outlook(), -np.inf, -1

    def queued(self, execution: str, query: str) -> None:
        self.groups.setdefault(query, {})[execution] = None

    def started(self, execution: str, query: str, now: float) -> None:
        self.groups.setdefault(query, {})[execution] = now

    def ended(self, execution: str, query: str, now: float, *, counts: bool = True) -> None:
        start = self.groups[query].pop(execution)
        if counts and start is not None:
            self.over *= survival_module._KEEP
            self.over[survival_module._bin(now - start)] += 1
        if not self.groups[query]:
            del self.groups[query]

    def outlook(self, now: float, missing: int) -> Outlook:
        if self.over.sum() < survival_module._FEWEST or not self.groups:
            return Outlook()
        if missing == self.about and now - self.made < 0.05 * survival_module.typical_s(self.over):
            return self.known
        members = np.zeros((len(self.groups), len(self.over)), dtype=np.float32)
        for row, starts in zip(members, self.groups.values(), strict=True):
            for start in starts.values():
                row[survival_module._bin(0.0 if start is None else now - start)] += 1
        self.known = survival_module.expect(self.over, members, [], missing)
        self.made, self.about = now, missing
        return self.known


def near(one: Outlook, other: Outlook) -> bool:
    """Equal but for the order in which float32 were added."""
    pairs = ((one.next_group_s, other.next_group_s), (one.step_eta_s, other.step_eta_s))
    return all((a is None) == (b is None) and (a is None or a == pytest.approx(b, rel=1e-4)) for a, b in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_counts_that_are_kept_are_those_made_anew(seed: int) -> None:
    """Executions queue, start, age and end at random; groups of many sizes; numbers and places are used again."""
    random = np.random.default_rng(seed)
    kept, anew = Survival(), FromScratch()
    waiting: list[tuple[str, str]] = []
    running: list[tuple[str, str]] = []
    now = 1e6 * seed  # a late clock rounds more
    for number in range(400):
        now += float(random.exponential(30.0))
        for member in range(int(random.integers(0, 4))):
            waiting.append((f"{number}-{member}", f"q{number}"))
            for one in (kept, anew):
                one.queued(*waiting[-1])
        while waiting and random.random() < 0.7:
            running.append(waiting.pop(int(random.integers(len(waiting)))))
            for one in (kept, anew):
                one.started(*running[-1], now)
        while running and random.random() < 0.6:
            execution, query = running.pop(int(random.integers(len(running))))
            counts = bool(random.random() < 0.9)
            for one in (kept, anew):
                one.ended(execution, query, now, counts=counts)
        assert near(kept.outlook(now, number % 5), anew.outlook(now, number % 5))


def test_decisions_are_those_of_counts_made_anew() -> None:
    """A whole simulated run, decided with either estimate: the same actions at the same moments."""
    workload = load_workload("qwen3.8-2.4t").change(**{"run.steps": 4})
    logs = []
    for survival in (Survival(), FromScratch()):
        recorder = Recorder()
        simulator = Simulator(workload, Drawn(workload), "elastic-plus", recorder=recorder)
        simulator.view.survival = survival
        simulator.run()
        decisions = [e for e in recorder.events if e["kind"] == "decision"]
        logs.append([(e["t"], e["actions"], e["admit"]) for e in decisions])
    assert logs[0] == logs[1]
    assert len(logs[0]) > 5
