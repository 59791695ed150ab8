"""What the engine returned is kept as it is; what is missing is never made up."""

from __future__ import annotations

import numpy as np

from opengyre.proxy.sampled import Sampled
from opengyre.rollout.base import TokenChunk


def test_runs_are_split_where_version_or_cell_changes():  # N11
    sampled = Sampled()
    sampled.add(TokenChunk([1, 2], [-0.1, -0.2], 4, cached_tokens=7), "a")
    sampled.add(TokenChunk([3], [-0.3], 4), "a")
    sampled.add(TokenChunk([4], [-0.4], 5, cached_tokens=9), "a")
    sampled.add(TokenChunk([], [], 6), "b")
    sampled.add(TokenChunk([5], [-0.5], 5), "b")
    spans = sampled.spans()
    assert [(s.ids.tolist(), s.version, s.cell) for s in spans] == [([1, 2, 3], 4, "a"), ([4], 5, "a"), ([5], 5, "b")]
    assert sampled.ids == [1, 2, 3, 4, 5] and len(sampled) == 5 and sampled.cached_tokens == 7
    assert sampled.usable and all(s.trainable for s in spans)
    assert not any(s.trainable for s in sampled.spans(trainable=False))


def test_missing_ids_and_logprobs_are_counted():  # P13, P14
    sampled = Sampled()
    sampled.add(TokenChunk([1], [-0.1], 0), "a")
    sampled.add(TokenChunk([], [-0.3, -0.9], 0), "a")
    sampled.add(TokenChunk([2, 3], [-0.2], 0), "a")
    (span,) = sampled.spans()
    assert sampled.gaps == 2 and not sampled.usable and not span.trainable
    assert span.ids.tolist() == [1, 2, 3] and np.isnan(span.logprobs[1:]).all()
    assert not (span.logprobs == 0.0).any()


def test_a_logprob_that_is_not_finite_spoils_the_reply():
    for bad in (float("nan"), float("inf"), -float("inf")):
        sampled = Sampled()
        sampled.add(TokenChunk([1, 2], [-0.1, bad], 0), "a")
        assert sampled.not_finite == 1 and not sampled.usable and not sampled.spans()[0].trainable
