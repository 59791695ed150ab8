"""Executions taken from recorded runs: exactly those asked for, each token once."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from opengyre.errors import ConfigError
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.record.types import Role
from opengyre.samples.build import build_samples
from opengyre.samples.recorded import Keep, Recorded, batches, only, read_recorded, split_off
from opengyre.samples.select import Path as TreePath
from opengyre.samples.select import Segment
from recording import REWARDS, record_run, talk


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_run(tmp_path / "run")


def rewards(sources: list[Path], keep: Keep) -> list[float | None]:
    return [r.reward for r in read_recorded(sources, keep)]


def test_all_executions_of_the_split_pass_without_a_bound(run: Path) -> None:
    assert rewards([run], Keep()) == REWARDS
    assert rewards([run], Keep(splits=("held_out",))) == [1.0]
    assert rewards([run], Keep(splits=("train", "held_out"))) == [1.0, *REWARDS]


@pytest.mark.parametrize("low", [0.0, 0.25, 0.5, 1.0])
def test_rejection_keeps_exactly_those_rewards(run: Path, low: float) -> None:
    assert rewards([run], Keep(min_reward=low)) == [r for r in REWARDS if r is not None and r >= low]


def test_a_band_of_rewards(run: Path) -> None:
    assert rewards([run], Keep(min_reward=0.25, max_reward=0.5)) == [0.25, 0.5]
    assert rewards([run], Keep(max_reward=0.25)) == [0.0, 0.25]


def test_nothing_that_passes_is_an_error_that_says_what_there_was(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"min reward 2\) of 6 recorded, rewards from 0 to 1"):
        read_recorded([run], Keep(min_reward=2.0))


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no calls\.db"):
        read_recorded([tmp_path], Keep())
    with pytest.raises(ConfigError, match="no such folder or file"):
        read_recorded([tmp_path / "none"], Keep())


def test_samples_are_the_recorded_ids_and_train_what_was_sampled(run: Path) -> None:
    with Store.open(run / "calls.db", readonly=True) as store:
        for one in read_recorded([run], Keep()):
            tree = store.load_tree(one.execution_id.partition("-")[2])
            (sample,) = one.samples
            path = tree.rebuild(tree.leaves()[0])
            assert np.array_equal(sample.ids, path.ids)
            assert np.array_equal(sample.mask, path.sampled)
            assert sample.advantage == 1.0
            assert sample.weight * one.tokens == pytest.approx(1.0)


def test_one_voice_per_token_if_so_wanted(run: Path) -> None:
    assert {s.weight for r in read_recorded([run], Keep(weight="token")) for s in r.samples} == {1.0}


def test_runs_side_by_side_keep_their_executions_apart(run: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "other")
    both = read_recorded([run, other], Keep(min_reward=1.0))
    assert [r.execution_id for r in both] == ["0-e4", "1-e4"]


def test_roles_other_than_those_asked_for_are_not_drawn() -> None:
    paths = [
        TreePath(n, role, (Segment((n, 0, 4), 4),)) for n, role in enumerate([Role.MAIN, Role.SUB_AGENT, Role.MAIN])
    ]
    pick = only([Role.SUB_AGENT])
    assert pick(paths, [4, 4, 4], Random(0)) == 1
    assert pick(paths[:1], [4], Random(0)) is None


def made(count: int, tasks: int) -> list[Recorded]:
    tree = talk(0).tree
    samples = build_samples(tree, assign_roles(tree), execution_id="e", query_id="q", advantage=1.0)
    return [Recorded(f"e{n}", f"task-{n % tasks}", None, samples) for n in range(count)]


def test_whole_tasks_are_held_out_and_the_choice_is_fixed() -> None:
    recorded = made(60, 20)
    train, held_out = split_off(recorded, 0.1, 0)
    assert {r.about for r in train}.isdisjoint({r.about for r in held_out})
    assert len({r.about for r in held_out}) == 2
    assert split_off(recorded, 0.1, 0) == (train, held_out)
    assert split_off(recorded, 0.1, 1) != (train, held_out)
    assert split_off(recorded, 0.0, 0) == (recorded, [])
    assert len(split_off(made(3, 1), 0.5, 0)[1]) == 0, "one task alone cannot be held out"


def test_batches_hold_every_execution_once_and_about_the_tokens_asked_for() -> None:
    recorded = made(50, 50)
    own = recorded[0].tokens
    plan = list(batches(recorded, 4 * own, Random(0)))
    assert sorted(r.execution_id for b in plan for r in b) == sorted(r.execution_id for r in recorded)
    assert all(len(b) == 4 for b in plan[:-1])
    assert plan == list(batches(recorded, 4 * own, Random(0)))
    assert plan != list(batches(recorded, 4 * own, Random(1)))
    assert all(len(b) == 1 for b in batches(recorded, 1, Random(0))), "one execution is never cut"
