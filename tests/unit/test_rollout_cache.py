"""The prefix cache against a dictionary of what was put in."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.rollout.torch_cache import PrefixCache, as_ids

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def kv(ids: list[int]) -> torch.Tensor:
    """A stand-in for KV that depends on the whole prefix, as KV does: [1, tokens, 1]."""
    return torch.tensor([hash(tuple(ids[: i + 1])) % 9973 for i in range(len(ids))], dtype=torch.float32)[None, :, None]


def put(cache: PrefixCache, ids: list[int]) -> int:
    return cache.insert(as_ids(ids), lambda start, end: [kv(ids)[:, start:end].clone()])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(IDS, st.sampled_from(["put", "put", "match", "evict"])), max_size=30))
def test_a_match_is_the_longest_stored_prefix_and_memory_is_its_unique_tokens(steps: list[tuple[list[int], str]]):
    cache, held = PrefixCache(), set()  # held: every stored prefix, one per unique token
    for ids, what in steps:
        prefixes = {tuple(ids[: i + 1]) for i in range(len(ids))}
        if what == "put":
            assert put(cache, ids) == len(prefixes - held)
            held |= prefixes
        elif what == "evict":
            before = cache.tokens
            dropped = cache.evict(len(ids))
            assert dropped >= min(len(ids), before) and cache.tokens == before - dropped
            held = {p for p in held if cache.match(as_ids(p))[0] == len(p)}
        n, found = cache.match(as_ids(ids))
        assert n == sum(p in held for p in prefixes)
        if n:
            got = torch.cat([segment[0][:, :take] for segment, take in found], 1)
            assert torch.equal(got, kv(ids)[:, :n])
        assert cache.tokens == len(held)


def test_the_least_recently_used_prefix_goes_first_and_its_shared_part_stays() -> None:
    cache = PrefixCache()
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    cache.match(as_ids([1, 2, 3, 4]))
    assert cache.evict(1) == 2
    assert cache.match(as_ids([1, 2, 5, 6]))[0] == 2 and cache.match(as_ids([1, 2, 3, 4]))[0] == 4
    assert cache.evict(100) == 4 and cache.tokens == 0
