"""From trees to samples and micro-steps. Field cases T01, N03, N04, S06, S07."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.record.call import CommittedCall, digest_ids
from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Finish, Role, Span
from opengyre.samples.advantage import Degenerate
from opengyre.samples.build import Member, build_group, build_samples, pack_micro_steps, unique_tokens
from opengyre.samples.types import Sample


def say(tree: Tree, tail: list[int], *replies: list[int], after: str = "", depth: int = 0, usable=True) -> str:
    """Commit a call whose prompt is ``depth`` tokens of call ``after`` plus ``tail``; reply i is of version 3 + i."""
    attach = tree.at(after, depth)
    call = f"c{len(tree.calls()):03}"
    spans = tuple(
        Span(np.array(r, np.int32), np.array([-0.01 * t for t in r], np.float32), 3 + i, "cell-1")
        for i, r in enumerate(replies)
    )
    tree.commit(
        CommittedCall(
            attach=attach,
            tail_ids=np.array(tail, np.int32),
            marks=(),
            sampled=spans,
            reply_key=None,
            meta=CallMeta(call, "messages", 0.0, 1.0, Finish.STOP, delivered=True),
            prompt_digest=digest_ids(tree.prompt_ids(attach), np.array(tail, np.int32)),
            sampled_digest=digest_ids(*(s.ids for s in spans)),
            usable=usable,
        )
    )
    return call


def build(tree: Tree, roles: dict[int, Role] | None = None, *, advantage: float = 1.0, **more) -> list[Sample]:
    """Samples of a tree whose leaves are all main unless said."""
    roles = roles if roles is not None else dict.fromkeys(tree.leaves(), Role.MAIN)
    return build_samples(tree, roles, execution_id="e", query_id="q", advantage=advantage, **more)


def test_t01_two_sampling_events_of_the_same_ids_are_trained_each_in_its_own_sample() -> None:
    tree = Tree()
    first = say(tree, [11, 12], [21])
    say(tree, [31], [41], after=first, depth=3)
    other = say(tree, [11, 12], [21, 31, 41, 51])
    say(tree, [61], [71], after=other, depth=6)
    samples = {tuple(s.ids.tolist()): s for s in build(tree)}
    assert set(samples) == {(11, 12, 21, 31, 41), (11, 12, 21, 31, 41, 51, 61, 71)}
    trained = {key: s.ids[s.mask].tolist() for key, s in samples.items()}
    assert trained[(11, 12, 21, 31, 41)] == [21, 41]
    assert trained[(11, 12, 21, 31, 41, 51, 61, 71)] == [21, 31, 41, 51, 71]
    for sample in samples.values():
        assert np.isnan(sample.logprobs).tolist() == (~sample.mask).tolist()
        assert sample.weight == pytest.approx(1 / 7)


def test_versions_are_over_the_trainable_tokens_and_segments_are_nodes() -> None:
    tree = Tree()
    call = say(tree, [1, 2], [10, 11], [12])  # versions 3 and 4 in one reply
    say(tree, [5], [13], after=call, depth=4)  # leaves the reply after two of its three tokens
    (longest, rest) = sorted(build(tree, run_seed=1), key=lambda s: -s.tokens)
    assert {(s.oldest_version, s.newest_version) for s in (longest, rest)} <= {(3, 4), (3, 3), (4, 4)}
    fresh = [s for s in (longest, rest) if 12 in s.ids[s.mask].tolist()]
    assert fresh[0].newest_version == 4
    assert {s.segments for s in (longest, rest)} == {((1, 2), (2, 3)), ((1, 2), (2, 2), (3, 1), (4, 1))}


def random_tree(seed: int) -> Tree:
    """Up to a dozen calls that continue, rewind and fork anywhere; some unusable."""
    random, tree = Random(seed), Tree()
    ends: list[tuple[str, int]] = [("", 0)]
    for _ in range(random.randint(1, 12)):
        after, length = random.choice(ends)
        depth = random.randint(0, length)
        tail = [random.randrange(5) for _ in range(random.randint(1, 4))]
        replies = [[random.randrange(5) for _ in range(random.randint(1, 4))] for _ in range(random.randint(0, 2))]
        call = say(tree, tail, *replies, after=after, depth=depth, usable=random.random() < 0.8)
        ends.append((call, depth + len(tail) + sum(map(len, replies))))
    return tree


@given(st.integers(0, 5000))
def test_on_any_tree_samples_are_the_recorded_paths_and_train_each_token_once(seed) -> None:
    tree = random_tree(seed)
    roles = {leaf: Random(seed + leaf).choice(list(Role)) for leaf in tree.leaves()}
    samples = build(tree, roles, j_max=99, run_seed=seed)
    trained: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        path = tree.rebuild(int(sample.sample_id.rpartition("/")[2]))
        assert sample.ids.tolist() == path.ids.tolist()
        assert not (sample.mask & ~path.trainable).any()
        assert np.array_equal(sample.logprobs, path.logprobs, equal_nan=True)
        assert sum(n for _, n in sample.segments) == len(sample.ids)
        versions = path.versions[sample.mask]
        assert (sample.oldest_version, sample.newest_version) == (versions.min(), versions.max())
        trained.update(zip(path.nodes[sample.mask].tolist(), np.flatnonzero(sample.mask).tolist(), strict=True))
    assert set(trained.values()) <= {1}
    everything = set()
    for leaf in tree.leaves():
        path = tree.rebuild(leaf)
        everything.update(
            zip(path.nodes[path.trainable].tolist(), np.flatnonzero(path.trainable).tolist(), strict=True)
        )
    assert set(trained) == {(node, at) for node, at in everything if at > 0}
    if samples:
        assert sum(s.weight * s.tokens for s in samples) == pytest.approx(1.0)


def sample(execution: str, name: str, tokens: int, *, trained: int, weight: float = 1.0, advantage=1.0, segments=()):
    """A sample of ``tokens`` tokens whose last ``trained`` are trained."""
    mask = np.arange(tokens) >= tokens - trained
    return Sample(
        sample_id=f"{execution}/{name}",
        execution_id=execution,
        query_id="q",
        role=Role.MAIN,
        ids=np.zeros(tokens, np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        advantage=advantage,
        weight=weight,
        oldest_version=0,
        newest_version=0,
        segments=segments or ((hash(name) % 997 + 1, tokens),),
    )


def chain(replies: list[int]) -> Tree:
    """One execution of separate histories, each of one reply of the given length."""
    tree = Tree()
    for i, n in enumerate(replies):
        say(tree, [100 + i], list(range(1, n + 1)))
    return tree


def loss(micro_steps: list[list[Sample]], row_loss: dict[str, float], executions: int) -> float:
    """Sum over tokens of weight * that row's per-token loss, over micro-steps in order, scaled once at the end."""
    sums = [sum(s.weight * s.tokens * row_loss[s.execution_id] for s in micro) for micro in micro_steps]
    return sum(sums) / executions


@pytest.mark.parametrize("budget", [10_000, 6, 1])
@pytest.mark.parametrize("rows_of_a", [[6], [3, 3], [1, 5]])
def test_n03_an_execution_has_one_voice_however_it_is_split(budget: int, rows_of_a: list[int]) -> None:
    """A has loss 3.0 per token, B three rows of loss 1.0: 2.0 for any rows of A and any micro-steps."""
    rows = []
    for name, tree in (("A", chain(rows_of_a)), ("B", chain([2, 5, 1]))):
        roles = dict.fromkeys(tree.leaves(), Role.MAIN)
        rows += build_samples(tree, roles, execution_id=name, query_id="q", advantage=1.0)
    micro_steps = pack_micro_steps(rows, budget)
    assert loss(micro_steps, {"A": 3.0, "B": 1.0}, executions=2) == pytest.approx(2.0)
    halves = [loss(micro_steps[i::2], {"A": 3.0, "B": 1.0}, executions=2) for i in (0, 1)]  # two cells
    assert sum(halves) == pytest.approx(2.0)


def test_n04_every_row_trains_its_own_tokens_with_the_scalar_advantage() -> None:
    rows = build(chain([3, 5, 2]), advantage=0.7)
    assert len(rows) == 3
    for row in rows:
        assert row.advantage == 0.7
        assert float(np.abs(row.advantage * row.mask).sum()) == pytest.approx(0.7 * row.tokens)
    assert sorted(row.tokens for row in rows) == [2, 3, 5]


def test_s06_s07_an_unscored_execution_leaves_loss_and_baseline() -> None:
    tree = chain([4])
    roles = dict.fromkeys(tree.leaves(), Role.MAIN)
    rewards = {"a": 1.0, "b": None, "c": 0.0, "d": None}
    members = [Member(name, tree, roles, reward) for name, reward in rewards.items()]
    group = build_group("q", members, kind="mean")
    assert [(s.execution_id, s.advantage) for s in group.samples] == [("a", 0.5), ("c", -0.5)]
    assert (group.advantage.valid, group.advantage.excluded, group.advantage.mean) == (2, 2, 0.5)


def test_a_degenerate_group_has_no_samples_and_says_why() -> None:
    tree = chain([4])
    members = [Member(name, tree, dict.fromkeys(tree.leaves(), Role.MAIN), 1.0) for name in "abc"]
    group = build_group("q", members)
    assert group.samples == []
    assert group.advantage.degenerate is Degenerate.NO_VARIANCE


def test_an_execution_without_a_trainable_token_gives_no_samples() -> None:
    tree = Tree()
    say(tree, [1, 2], [3], usable=False)
    say(tree, [1, 9])
    assert build(tree) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(2, 50)), max_size=20),
    st.integers(1, 80),
    st.booleans(),
)
def test_micro_steps_hold_every_sample_once_within_the_budget(raw, budget, shared) -> None:
    samples = [sample(e, str(i), n, trained=1, segments=((i + 1, n),)) for i, (e, n) in enumerate(raw)]
    packed = pack_micro_steps(samples, budget, shared_prefix=shared)
    assert Counter(s.sample_id for micro in packed for s in micro) == Counter(s.sample_id for s in samples)
    assert all(packed)
    for micro in packed:
        assert len(micro) == 1 or sum(len(s.ids) for s in micro) <= budget
    assert [[s.sample_id for s in m] for m in pack_micro_steps(samples, budget, shared_prefix=shared)] == [
        [s.sample_id for s in m] for m in packed
    ]


def test_an_execution_stays_together_when_it_fits() -> None:
    samples = [sample(e, f"{e}{i}", 30, trained=1) for i in range(2) for e in "abc"]
    packed = pack_micro_steps(samples, 60)
    assert [{s.execution_id for s in micro} for micro in packed] == [{"a"}, {"b"}, {"c"}]


def test_shared_prefixes_count_once_where_the_trainer_packs_them() -> None:
    """Trunk of 100 (node 1), of which one path uses 60; tails of 10: 100 + 10 + 10 unique, 280 in all."""
    a = sample("e", "a", 110, trained=10, segments=((1, 100), (2, 10)))
    b = sample("e", "b", 70, trained=10, segments=((1, 60), (3, 10)))
    c = sample("e", "c", 100, trained=10, segments=((1, 100),))
    assert unique_tokens([a, b, c]) == 120
    assert len(pack_micro_steps([a, b, c], 120, shared_prefix=True)) == 1
    assert len(pack_micro_steps([a, b, c], 120)) == 3
    assert len(pack_micro_steps([a, b, c], 60, shared_prefix=True)) == 3  # each is longer than the budget
    assert len(pack_micro_steps([a, b, c], 60, shared_prefix=True, row=1000)) == 1  # but they had better stay together
