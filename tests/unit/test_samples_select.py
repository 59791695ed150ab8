"""Selection: trained once, capped, by priority, in proportion, replayable (SPEC §3.5, §4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.errors import ConfigError
from opengyre.record.types import Role
from opengyre.samples.select import Path, Segment, load_picker, select

SEGMENTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=6)
PATHS = st.lists(st.tuples(st.sampled_from(list(Role)), SEGMENTS), min_size=1, max_size=9)


def paths_from(raw: list[tuple[Role, list[tuple[int, int]]]]) -> list[Path]:
    """Paths over a common pool of segments; a segment has one size wherever it appears."""
    sizes: dict[int, int] = {}
    paths = []
    for leaf, (role, segments) in enumerate(raw):
        keys = {node: sizes.setdefault(node, tokens) for node, tokens in segments}
        paths.append(Path(leaf, role, tuple(Segment((node, 0, 100), t) for node, t in keys.items())))
    return paths


@given(PATHS, st.integers(1, 6), st.integers(0, 99))
def test_each_token_is_trained_at_most_once_and_the_cap_holds(raw, j_max, seed) -> None:
    paths = paths_from(raw)
    picks = select(paths, j_max=j_max, run_seed=seed, execution_id="e")
    trained = [key for pick in picks for key in pick.trainable]
    tokens = {s.key: s.tokens for p in paths for s in p.segments}
    assert len(trained) == len(set(trained))
    assert len(picks) <= j_max
    assert all(pick.trainable for pick in picks)
    assert all(tokens[key] > 0 for key in trained)  # a segment without trainable tokens is never emitted
    if len(picks) < j_max:  # it stopped because nothing was left
        assert set(trained) == {key for key, n in tokens.items() if n}


@given(PATHS, st.integers(0, 99))
def test_roles_come_in_order_of_priority(raw, seed) -> None:
    picks = select(paths_from(raw), j_max=99, run_seed=seed, execution_id="e")
    ranks = [list(Role).index(pick.path.role) for pick in picks]
    assert ranks == sorted(ranks)


@given(PATHS, st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_same_seed_replays_whatever_the_order_of_paths(raw, seed, random) -> None:
    paths = paths_from(raw)
    shuffled = random.sample(paths, len(paths))
    assert select(paths, j_max=5, run_seed=seed, execution_id="e") == select(
        shuffled, j_max=5, run_seed=seed, execution_id="e"
    )


def test_the_draw_is_in_proportion_to_unmasked_sampled_tokens() -> None:
    """Chi-square over 4000 executions; 3 degrees of freedom, p = 0.001 at 16.27. Seeded, so it cannot flake."""
    tokens = {0: 10, 1: 20, 2: 30, 3: 40}
    shared = Segment((99, 0, 5), 0)  # context: weighs nothing
    paths = [Path(leaf, Role.MAIN, (shared, Segment((leaf, 0, n), n))) for leaf, n in tokens.items()]
    n = 4000
    seen = Counter(select(paths, j_max=1, run_seed=1, execution_id=f"e{i}")[0].leaf for i in range(n))
    expected = {leaf: n * t / 100 for leaf, t in tokens.items()}
    assert sum((seen[leaf] - e) ** 2 / e for leaf, e in expected.items()) < 16.27


def test_what_was_drawn_no_longer_weighs() -> None:
    """Two leaves share 1000 tokens and have 1 and 3 of their own: the second draw is certain, the first 1001:1003."""
    trunk = Segment((0, 0, 1000), 1000)
    paths = [Path(i, Role.MAIN, (trunk, Segment((i, 1000, 1000 + n), n))) for i, n in ((1, 1), (2, 3))]
    for seed in range(20):
        first, second = select(paths, j_max=5, run_seed=seed, execution_id="e")
        assert trunk.key in first.trainable
        assert second.trainable == (second.path.segments[1].key,)


def shortest(paths: Sequence[Path], weights: Sequence[int], random: Random) -> int | None:
    """A picker of a user's: fewest tokens first, whatever the role; stops at three tokens or fewer."""
    index = min(range(len(paths)), key=lambda i: weights[i])
    return index if weights[index] > 3 else None


def test_a_users_picker_is_loaded_by_name_and_cannot_train_twice() -> None:
    picker = load_picker(f"{__name__}:shortest")
    trunk = Segment((0, 0, 10), 10)
    paths = [Path(i, Role.SUB_AGENT, (trunk, Segment((i, 10, 10 + n), n))) for i, n in ((1, 9), (2, 4), (3, 2))]
    picks = select(paths, j_max=5, run_seed=0, execution_id="e", picker=picker)
    assert [pick.leaf for pick in picks] == [3, 2, 1]
    assert [pick.trainable for pick in picks] == [((0, 0, 10), (3, 10, 12)), ((2, 10, 14),), ((1, 10, 19),)]


@pytest.mark.parametrize("name", ["nowhere:f", "json:nothing", "json", ":"])
def test_a_picker_that_does_not_exist_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"samples\.picker"):
        load_picker(name)


def test_a_picker_out_of_range_is_named() -> None:
    paths = [Path(1, Role.MAIN, (Segment((1, 0, 1), 1),))]
    with pytest.raises(ConfigError, match="picker chose 7 of 1"):
        select(paths, j_max=1, run_seed=0, execution_id="e", picker=lambda *_: 7)
