"""Policies: pure, never leave executions unserved, keep their cool-down, do not flap. Field case C03."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.cells.policies import POLICIES, make_policy
from opengyre.cells.policies.base import Action, CellView, Decision, Policy, Snapshot
from opengyre.cells.policies.lend import release_share
from opengyre.cells.state import CellState
from opengyre.config import CellsConfig, RunConfig, SamplesConfig, ScheduleConfig
from opengyre.errors import ConfigError

ROLLOUT, TRAINING = CellState.ROLLOUT, CellState.TRAINING
SLOTS = 4


def config(policy: str = "elastic", **schedule) -> RunConfig:
    """3 satellites of 4 slots, groups of 4, 2 queries a step."""
    return RunConfig(
        cells=CellsConfig(satellites=3, slots=SLOTS),
        samples=SamplesConfig(group_size=4, queries_per_step=2),
        schedule=ScheduleConfig(policy=policy, **{"cooldown_s": 2.0, "switch_cost_s": 1.0, **schedule}),
    )


def cells(*states: CellState, core: CellState = TRAINING, since: float = 0.0) -> list[CellView]:
    """A core and satellites s1, s2, … in these states."""
    core_view = CellView("core", True, core, 0, 0, since)
    return [core_view, *(CellView(f"s{i}", False, state, 0, i, since) for i, state in enumerate(states, 1))]


def see(views: list[CellView], **fields) -> Snapshot:
    """A snapshot; quiet unless said."""
    quiet = {
        "now": 100.0,
        "slots": SLOTS,
        "queued": 0,
        "running": 0,
        "unfinished_groups": 0,
        "admissible_queries": 0,
        "claimable_micro_steps": 0,
        "step_open": True,
        "step_full": False,
        "version": 3,
    }
    return Snapshot(cells=views, **{**quiet, **fields})


def moves(policy: Policy, snapshot: Snapshot) -> dict[str, str]:
    """Actions by cell."""
    return {a.cell: a.role for a in policy.decide(snapshot).actions}


# -- what holds for every policy --------------------------------------------------------------------------------------

COUNT = st.one_of(st.none(), st.integers(0, 30))
SNAPSHOTS = st.builds(
    lambda states, core, since, **fields: see(
        [msgspec.structs.replace(c, since=t) for c, t in zip(cells(*states, core=core), since, strict=False)], **fields
    ),
    st.lists(st.sampled_from(list(CellState)), min_size=1, max_size=5),
    st.sampled_from(list(CellState)),
    st.lists(st.sampled_from([0.0, 90.0, 98.5, 100.0]), min_size=6, max_size=6),
    queued=COUNT,
    running=COUNT,
    unfinished_groups=st.integers(0, 4),
    admissible_queries=st.integers(0, 4),
    claimable_micro_steps=st.integers(0, 9),
    claimed_micro_steps=st.integers(0, 3),
    step_open=st.booleans(),
    step_full=st.booleans(),
    step_groups=st.one_of(st.none(), st.integers(0, 2)),
    ready_groups=st.integers(0, 2),
    micro_step_s=st.one_of(st.none(), st.sampled_from([0.01, 1.0, 50.0])),
    step_eta_s=st.one_of(st.none(), st.sampled_from([0.1, 100.0])),
    next_group_s=st.one_of(st.none(), st.sampled_from([0.1, 100.0])),
    switch_cost_s=st.one_of(st.none(), st.sampled_from([0.1, 8.0])),
    trainer_idle_steps=st.integers(0, 9),
    training_cells=st.none() | st.floats(0, 9),
)


def both(name: str, snapshot: Snapshot) -> tuple[Policy, Decision]:
    """The policy and its decision, asked of two objects and after another question: it keeps no state."""
    policy = make_policy(config(name, train_cells=1))
    decision = policy.decide(snapshot)
    policy.decide(msgspec.structs.replace(snapshot, queued=30, now=1e6))
    assert policy.decide(snapshot) == make_policy(config(name, train_cells=1)).decide(snapshot) == decision
    return policy, decision


@pytest.mark.parametrize("name", POLICIES)
@given(snapshot=SNAPSHOTS)
def test_every_decision_is_pure_and_sound(name: str, snapshot: Snapshot) -> None:
    policy, decision = both(name, snapshot)
    views = {c.name: c for c in snapshot.cells}
    assert decision.reason
    assert len({a.cell for a in decision.actions}) == len(decision.actions)
    for action in decision.actions:
        cell = views[action.cell]
        assert cell.state.stable  # nobody on the way is called back
        assert cell.heading != action.role
        assert policy.moves_core or not cell.core
        core_due = name == "elastic-plus" and cell.core and snapshot.step_full  # a full step does not wait
        assert name == "colocate" or core_due or snapshot.now - cell.since >= 2.0
    if snapshot.waterlevel is None:
        assert decision.actions == [] or name == "async"  # a fixed split measures nothing
    gone = {a.cell for a in decision.actions if a.role == "train"}
    serving = {c.name for c in snapshot.serving()}
    if gone and serving and snapshot.waterlevel != 0:
        assert serving - gone  # colocate never sends anybody to training before the waterlevel is 0


# -- elastic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "flips"),
    [(13, {}), (9, {}), (8, {"s1": "train"}), (0, {"s1": "train"})],
)
def test_elastic_flips_one_satellite_when_the_others_have_the_slots(level: int, flips: dict[str, str]) -> None:
    policy = make_policy(config())
    snapshot = see(cells(ROLLOUT, ROLLOUT, ROLLOUT), queued=level // 3, running=level - level // 3)
    assert moves(policy, snapshot) == {}  # nothing to train
    assert moves(policy, msgspec.structs.replace(snapshot, claimable_micro_steps=5)) == flips


def test_elastic_counts_queries_about_to_be_admitted_as_executions() -> None:
    snapshot = see(cells(ROLLOUT, ROLLOUT), running=2, claimable_micro_steps=5)
    assert moves(make_policy(config()), snapshot) == {"s1": "train"}
    assert moves(make_policy(config()), msgspec.structs.replace(snapshot, admissible_queries=1)) == {}


def test_elastic_sends_nobody_to_work_that_another_is_coming_for() -> None:
    views = cells(CellState.DRAINING, ROLLOUT, ROLLOUT)
    assert moves(make_policy(config()), see(views, running=1, claimable_micro_steps=1)) == {}
    assert moves(make_policy(config()), see(views, running=1, claimable_micro_steps=2)) == {"s2": "train"}


def test_elastic_keeps_the_last_serving_cell_until_the_last_execution_is_over() -> None:
    views = cells(TRAINING, TRAINING, ROLLOUT)
    assert moves(make_policy(config()), see(views, running=1, claimable_micro_steps=50)) == {}
    assert moves(make_policy(config()), see(views, claimable_micro_steps=50)) == {"s3": "train"}
    waiting = cells(TRAINING, CellState.JOINING_ROLLOUT, ROLLOUT)  # s2 is not there yet
    assert moves(make_policy(config()), see(waiting, running=1, claimable_micro_steps=50)) == {}


def test_elastic_brings_back_as_many_as_the_slots_need() -> None:
    views = cells(TRAINING, TRAINING, TRAINING)
    policy = make_policy(config())
    assert moves(policy, see(views, queued=1, claimable_micro_steps=9)) == {"s1": "rollout"}
    assert moves(policy, see(views, queued=8, claimable_micro_steps=9)) == {"s1": "rollout", "s2": "rollout"}
    assert len(moves(policy, see(views, queued=80))) == 3
    on_the_way = cells(TRAINING, CellState.FLUSHING, TRAINING)
    assert moves(policy, see(on_the_way, queued=4, claimable_micro_steps=9)) == {}


def test_elastic_goes_back_when_a_burst_begins_but_not_in_the_middle_of_a_step() -> None:
    views, policy = cells(TRAINING, TRAINING, ROLLOUT), make_policy(config())
    assert moves(policy, see(views, running=3, step_groups=0)) == {"s1": "rollout", "s2": "rollout"}
    assert moves(policy, see(views, running=1, step_groups=0)) == {}  # one execution, one cell
    assert moves(policy, see(views, running=3, step_groups=1)) == {}  # the rest of the step is on its way
    assert moves(policy, see(views, running=3, step_groups=2, step_full=True)) == {}  # the commit is near
    assert moves(policy, see(views, running=3, step_groups=0, ready_groups=1)) == {}  # it joins in a moment


def test_elastic_weighs_the_work_against_the_switch() -> None:
    """The satellite's share of 4 micro-steps beside the core is 2; a pair costs 2 x 3 s."""
    snapshot = see(cells(ROLLOUT, ROLLOUT), claimable_micro_steps=4, switch_cost_s=3.0)
    assert moves(make_policy(config()), msgspec.structs.replace(snapshot, micro_step_s=2.9)) == {}
    assert moves(make_policy(config()), msgspec.structs.replace(snapshot, micro_step_s=3.0)) == {"s1": "train"}
    configured = see(cells(ROLLOUT, ROLLOUT), claimable_micro_steps=4, micro_step_s=0.5)
    assert moves(make_policy(config(switch_cost_s=1.0)), configured) == {"s1": "train"}
    assert moves(make_policy(config(switch_cost_s=1.1)), configured) == {}


def test_elastic_takes_the_cell_with_the_fewest_calls_and_unknown_is_many() -> None:
    views = cells(ROLLOUT, ROLLOUT, ROLLOUT)
    views[1] = msgspec.structs.replace(views[1], running=None)
    assert moves(make_policy(config()), see(views, running=4, claimable_micro_steps=9)) == {"s2": "train"}


# -- the baselines ----------------------------------------------------------------------------------------------------


def test_colocate_waits_for_the_last_execution_then_moves_everybody() -> None:
    policy = make_policy(config("colocate"))
    rolling = cells(ROLLOUT, ROLLOUT, core=ROLLOUT)
    assert moves(policy, see(rolling, running=1, claimable_micro_steps=9)) == {}
    assert moves(policy, see(rolling, unfinished_groups=1, claimable_micro_steps=9)) == {}
    assert moves(policy, see(rolling, claimable_micro_steps=9)) == dict.fromkeys(("core", "s1", "s2"), "train")
    assert moves(policy, see(rolling)) == {}  # nothing to train either: an all-degenerate step
    training = cells(TRAINING, CellState.JOINING_TRAINING)
    assert moves(policy, see(training, claimable_micro_steps=9)) == {}
    assert moves(policy, see(training, admissible_queries=2)) == {"core": "rollout", "s1": "rollout"}


def test_async_sets_the_split_once_and_again_after_a_restart() -> None:
    policy = make_policy(config("async", train_cells=1))
    assert moves(policy, see(cells(ROLLOUT, ROLLOUT, ROLLOUT), running=9)) == {"s1": "train"}
    assert moves(policy, see(cells(TRAINING, ROLLOUT, ROLLOUT), running=99)) == {}
    assert moves(policy, see(cells(ROLLOUT, CellState.DEAD, CellState.STARTING), running=9)) == {}


def test_lend_moves_the_whole_pool_and_only_the_pool() -> None:
    policy = make_policy(config("lend", train_cells=1))
    idle = see(cells(TRAINING, ROLLOUT, ROLLOUT), running=9, step_groups=0)
    assert moves(policy, idle) == {"core": "rollout", "s1": "rollout"}
    assert moves(policy, msgspec.structs.replace(idle, claimable_micro_steps=1)) == {}
    assert moves(policy, msgspec.structs.replace(idle, step_eta_s=0.5)) == {}  # less than a switch pair
    assert moves(policy, msgspec.structs.replace(idle, running=2)) == {}  # a cell each is there already
    lent = see(cells(ROLLOUT, ROLLOUT, ROLLOUT, core=ROLLOUT), running=9)
    assert moves(policy, lent) == {}
    assert moves(policy, msgspec.structs.replace(lent, step_groups=1)) == {"core": "train", "s1": "train"}


def test_c03_one_event_moves_the_share_by_one_notch() -> None:
    notches = [release_share(n, start=0.4, notch=0.1, idle_steps_per_notch=2) for n in range(5)]
    assert notches == pytest.approx([0.4, 0.4, 0.5, 0.5, 0.6])
    assert release_share(10**6) == 1.0


# -- registry ---------------------------------------------------------------------------------------------------------


class Lazy:
    """A user's policy."""

    name, moves_core = "lazy", False

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot) -> Decision:
        """Never moves anybody."""
        return Decision([], "lazy")


def test_policies_are_made_by_name_or_by_module_and_class() -> None:
    assert [make_policy(config(name)).name for name in POLICIES] == list(POLICIES)
    assert list(POLICIES) == ["elastic", "elastic-plus", "colocate", "async", "lend"]
    assert make_policy(config(), f"{__name__}:Lazy").decide(see(cells(ROLLOUT))).reason == "lazy"


@pytest.mark.parametrize("name", ["elastik", "nowhere:P", "json:Nothing", "builtins:dict", "builtins:repr"])
def test_a_policy_that_does_not_exist_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.policy"):
        make_policy(config(), name)


# -- a synthetic run --------------------------------------------------------------------------------------------------


class Toy:
    """A run in whole seconds: executions of long-tailed length, micro-steps of 3 s, switches of 2 s, staleness 0."""

    def __init__(self, policy: Policy, *, satellites: int = 3, steps: int = 4) -> None:
        self.policy, self.steps = policy, steps
        self.state = {"core": TRAINING, **{f"s{i}": ROLLOUT for i in range(1, satellites + 1)}}
        self.since = dict.fromkeys(self.state, 0.0)
        self.arrival: dict[str, tuple[float, CellState]] = {}
        self.now, self.version, self.switches, self.unserved_s = 0.0, 0, 0, 0
        self.running: list[list[float]] = []
        self.queued: list[list[float]] = []
        self.micro: list[float] = []
        self.admissible, self.groups = 2, 0

    def snapshot(self) -> Snapshot:
        views = [CellView(n, n == "core", s, self.version, None, self.since[n]) for n, s in self.state.items()]
        return see(
            views,
            now=self.now,
            queued=len(self.queued),
            running=len(self.running),
            unfinished_groups=2 - self.groups,
            admissible_queries=self.admissible,
            claimable_micro_steps=len(self.micro),
            step_full=self.groups == 2,
            step_groups=self.groups,
        )

    def second(self) -> None:
        for name in [n for n, (at, _) in self.arrival.items() if self.now >= at]:
            self.state[name], self.since[name] = self.arrival.pop(name)[1], self.now
        self.apply(self.policy.decide(self.snapshot()).actions)
        while self.admissible:  # two groups of four; the last execution of each takes 30 s
            self.queued += [[4.0 + 2 * i, 2 - self.admissible] for i in range(3)] + [[30.0, 2 - self.admissible]]
            self.admissible -= 1
        serving = sum(s is ROLLOUT for s in self.state.values())
        self.unserved_s += bool(self.running) and not serving
        while self.queued and len(self.running) < serving * SLOTS:
            self.running.append(self.queued.pop(0))
        for execution in self.running:
            execution[0] -= min(1.0, serving * SLOTS / len(self.running))
        self.running = [e for e in self.running if e[0] > 0]
        done = 2 - len({e[1] for e in (*self.running, *self.queued)})
        self.micro += [3.0] * 4 * (done - self.groups)
        self.groups = done
        for _ in range(sum(s is TRAINING for s in self.state.values())):
            if self.micro:
                self.micro[0] -= 1.0
                self.micro = self.micro[1:] + [m for m in self.micro[:1] if m > 0]
        if self.groups == 2 and not self.micro:
            self.version, self.admissible, self.groups = self.version + 1, 2, 0
        self.now += 1.0

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            on_the_way, there = (
                (CellState.DRAINING, TRAINING) if action.role == "train" else (CellState.FLUSHING, ROLLOUT)
            )
            self.state[action.cell], self.since[action.cell] = on_the_way, self.now
            self.arrival[action.cell] = (self.now + 2.0, there)
            self.switches += 1

    def run(self) -> float:
        """Seconds until the last step is committed."""
        while self.version < self.steps:
            self.second()
            assert self.now < 2000, "the run does not end"
        return self.now


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_ends_under_every_policy_without_flapping(name: str) -> None:
    toy = Toy(make_policy(config(name, train_cells=1)))
    toy.run()
    cells_moved = len(toy.state) if make_policy(config(name)).moves_core else len(toy.state) - 1
    assert toy.switches <= 2 * cells_moved * (toy.steps + 1)  # at most there and back, once a step
    assert toy.unserved_s == 0


def test_on_the_synthetic_run_elastic_is_not_slower_than_the_baselines() -> None:
    seconds = {name: Toy(make_policy(config(name, train_cells=1))).run() for name in POLICIES}
    assert seconds["elastic"] <= min(seconds[name] for name in ("colocate", "async", "lend"))


def test_at_a_steady_waterlevel_the_roles_settle() -> None:
    """Whatever the level, repeated decisions reach a fixed point within one flip per satellite."""
    policy = make_policy(config())
    for level, work in itertools.product(range(14), (0, 50)):
        state = {"s1": ROLLOUT, "s2": ROLLOUT, "s3": ROLLOUT}
        for _ in range(4):
            decided = moves(policy, see(cells(*state.values()), running=level, claimable_micro_steps=work))
            state.update({n: TRAINING if role == "train" else ROLLOUT for n, role in decided.items()})
        assert decided == {}
        assert sum(s is ROLLOUT for s in state.values()) == (max(-(-level // SLOTS), 0) if work and level <= 12 else 3)
