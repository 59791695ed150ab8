"""Packed trees equal separate sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from opengyre.samples.types import Sample
from opengyre.training import attention
from opengyre.training.flash import Block, Blocks
from opengyre.training.forward import Forward
from opengyre.training.pack import Pack, pack, windows, within_budget
from training_models import make_sample, random_samples, tiny_qwen3

torch.set_num_threads(1)


def paths(packed: Pack) -> dict[str, list[int]]:
    """Rebuild every sample from the packed row."""
    out = {}
    chains = {}
    for chain in packed.chains:
        chains[chain.own] = [i for start, n in (*chain.before, chain.own) for i in range(start, start + n)]
    longest = sorted(chains.values(), key=len)
    for sample in packed.samples:
        for places in longest:
            ids = packed.ids[places][: len(sample.ids)]
            if np.array_equal(ids, sample.ids):
                assert packed.positions[places].tolist() == list(range(len(places)))
                out[sample.sample_id] = ids.tolist()
                break
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8))
def test_every_trajectory_is_in_the_row_once(sequences):
    samples = [make_sample(s, np.arange(len(s)) > 0, name=str(i)) for i, s in enumerate(sequences)]
    packed = pack(samples)
    assert paths(packed) == {s.sample_id: s.ids.tolist() for s in samples}
    assert len(packed.ids) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})  # unique prefixes
    assert sum(length for _, length in (c.own for c in packed.chains)) == len(packed.ids)
    for source, label, row in zip(packed.sources, packed.labels, packed.rows, strict=True):
        assert packed.positions[source] < len(packed.samples[row].ids) - 1
        assert label in packed.samples[row].ids
    for s in samples:
        assert (packed.rows == packed.samples.index(s)).sum() == s.tokens


def test_by_hand():
    a = make_sample([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], name="a")
    b = make_sample([1, 2, 3, 6, 7], [0, 0, 0, 1, 1], name="b")
    c = make_sample([9, 8, 7, 6], [0, 0, 0, 1], name="c")
    packed = pack([c, b, a])
    assert [s.sample_id for s in packed.samples] == ["a", "b", "c"]
    assert packed.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 8, 7, 6]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 0, 1, 2, 3]
    assert [(c.own, c.before) for c in packed.chains] == [((0, 5), ()), ((5, 2), ((0, 3),)), ((7, 4), ())]
    assert packed.sources.tolist() == [2, 3, 2, 5, 9] and packed.labels.tolist() == [4, 5, 6, 7, 6]


def test_budget():
    samples = random_samples(0, executions=6)
    for budget in (1, 40, 90, 10_000):
        packs = within_budget(samples, budget)
        assert sorted(s.sample_id for p in packs for s in p.samples) == sorted(s.sample_id for s in samples)
        assert all(len(p.ids) <= budget or len(p.samples) == 1 for p in packs)
    assert len(within_budget(samples, 10_000)) == 1 and within_budget([], 10) == []


def test_a_shared_prefix_is_kept_together_where_that_saves_work():
    long, short = np.arange(60) % 64, np.arange(10) % 64

    def branches(prefix: np.ndarray, n: int) -> list[Sample]:
        ids = [np.concatenate([prefix, [k] * 12]) for k in range(n)]
        return [make_sample(s, np.arange(len(s)) >= len(prefix), name=str(k)) for k, s in enumerate(ids)]

    assert [len(p.samples) for p in within_budget(branches(long, 4), 40)] == [1, 1, 1, 1]
    assert [len(p.samples) for p in within_budget(branches(long, 4), 40, 200)] == [4]
    assert [len(p.samples) for p in within_budget(branches(long, 4), 40, 90)] == [2, 2]  # 60 + 2 * 12 fit
    assert [len(p.samples) for p in within_budget(branches(short, 4), 40, 200)] == [2, 2]  # two forwards cost more


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 9))
def test_windows_cover_the_row_and_look_back_only(sequences, tokens):
    packed = pack([make_sample(s, np.arange(len(s)) > 0, name=str(i)) for i, s in enumerate(sequences)])
    cut = windows(packed, tokens)
    assert [w.first for w in cut] == list(range(0, len(packed.ids), tokens)) and cut[-1].last == len(packed.ids)
    assert sorted(i for w in cut for i in w.trained) == list(range(len(packed.sources)))
    starts = {chain.own[0] for chain in cut[-1].chains}
    seen = {i: {*_rows(chain), *range(chain.own[0], i + 1)} for chain in packed.chains for i in range(*_span(chain))}
    for w in cut:
        asked = [c for c in w.chains if c.own[0] >= w.first]
        assert [i for c in asked for i in range(*_span(c))] == list(range(w.first, w.last))
        for c in asked:
            assert all(start in starts and start // tokens == (start + n - 1) // tokens for start, n in c.before)
            assert all({*_rows(c), *range(c.own[0], i + 1)} == seen[i] for i in range(*_span(c)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 40))
def test_blocks_hold_each_pair_once(sequences, tokens):
    packed = pack([make_sample(s, np.arange(len(s)) > 0, name=str(i)) for i, s in enumerate(sequences)])
    for w in windows(packed, tokens):
        wanted, got = np.zeros((2, w.last - w.first, w.last), int)
        for chain in (c for c in w.chains if c.own[0] >= w.first):
            for row in range(*_span(chain)):
                wanted[row - w.first, [*_rows(chain), *range(chain.own[0], row + 1)]] = 1
        blocks, start = Blocks.of(w.chains, w.first), 0
        for length in blocks.triangles:
            own = slice(start, start + length)
            got[own, w.first + start : w.first + start + length] += np.tri(length, dtype=int)
            start += length
        for block in blocks.rectangles:
            shift = 0 if block.remembered else w.first
            got[block.asking, block.seen.start + shift : block.seen.stop + shift] += 1
        assert (got == wanted).all()


def test_siblings_ask_about_their_prefix_together():
    tails = [[7, 7, 7, 7, k, k] for k in range(5)] + [[7, 7, 8, 8]]
    packed = pack([make_sample(s, np.arange(len(s)) > 0, name=str(i)) for i, s in enumerate(tails)])
    blocks = Blocks.of(packed.chains, 0)
    assert blocks.triangles == [6, 2, 2, 2, 2, 2]
    assert blocks.rectangles == [
        Block(slice(6, 14), slice(0, 4), False),  # the four siblings by their common prefix
        Block(slice(14, 16), slice(0, 2), False),
    ]


def _span(chain) -> tuple[int, int]:
    return chain.own[0], sum(chain.own)


def _rows(chain) -> list[int]:
    return [i for start, n in chain.before for i in range(start, start + n)]


def separate(forward: Forward, samples: list[Sample]) -> torch.Tensor:
    """One plain forward of the whole model a sample, full logits."""
    out = []
    for s in samples:
        logits = forward._model(input_ids=torch.from_numpy(s.ids.astype(np.int64))[None]).logits[0]
        t = torch.from_numpy(np.flatnonzero(s.mask))
        out.append(logits.log_softmax(-1)[t - 1, torch.from_numpy(s.ids.astype(np.int64))[t]])
    return torch.cat(out)


def gradients(model, value: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(value, list(model.parameters())))


@pytest.mark.parametrize("block", [None, 512, 4])  # None: the flash kernel; 4: several masked blocks of queries a chain
@pytest.mark.parametrize("window", [None, 10])
def test_trees_equal_separate_sequences(monkeypatch, block, window):
    if block is not None:
        monkeypatch.setattr(attention, "QUERY_BLOCK", block)
        monkeypatch.setattr(attention, "FLASH_DEVICES", ())
    extra = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = tiny_qwen3(num_hidden_layers=3, **extra)
    forward = Forward(model)
    assert forward.trees and forward.head_split
    packed = pack(random_samples(1))
    assert len(packed.ids) < 0.8 * sum(len(s.ids) for s in packed.samples)
    got = forward.logprobs(packed)
    want = separate(forward, list(packed.samples))
    assert float((got - want).abs().max().detach()) <= 1e-12
    weights = torch.randn(len(got), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a, b in zip(gradients(model, got @ weights), gradients(model, want @ weights), strict=True):
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(
    ("tokens", "flash", "window"), [(3, True, None), (7, True, None), (7, False, 10), (64, False, None)]
)
def test_paths_longer_than_memory_train_in_windows(monkeypatch, tokens, flash, window):
    if not flash:
        monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
        monkeypatch.setattr(attention, "FLASH_DEVICES", ())
    extra = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = tiny_qwen3(num_hidden_layers=3, **extra)
    forward = Forward(model)
    packed = pack(random_samples(1))
    want = forward.logprobs(packed)
    weights = torch.randn(len(want), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = (want * want * weights).sum()  # the gradient of one token depends on its log-probability
    expected = gradients(model, loss)
    got = forward.logprobs(packed, tokens)
    assert float((got - want).abs().max().detach()) <= 1e-12
    (got * got * weights).sum().backward()
    for p, b in zip(model.parameters(), expected, strict=True):
        assert float((p.grad - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))
    with torch.no_grad():
        assert float((forward.logprobs(packed, tokens) - want).abs().max()) <= 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("tokens", [None, 7])
def test_flex_attention_sees_the_same(monkeypatch, tokens):
    model = tiny_qwen3(num_hidden_layers=3)
    forward = Forward(model)
    packed = pack(random_samples(1))
    with torch.no_grad():
        want = forward.logprobs(packed)
        monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))  # on a CPU it has no backward pass
        assert float((forward.logprobs(packed, tokens) - want).abs().max()) <= 1e-12


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_all_four_ways_agree(trees, split):
    forward = Forward(tiny_qwen3(), temperature=0.7)
    packed = pack(random_samples(2))
    want = forward.logprobs(packed)
    forward.trees, forward.head_split = trees, split
    assert float((forward.logprobs(packed) - want).abs().max().detach()) <= 1e-12


def test_large_vocabularies_are_projected_in_blocks(monkeypatch):
    model = tiny_qwen3()
    forward = Forward(model)
    packed = pack(random_samples(3))
    whole = forward.logprobs(packed)
    monkeypatch.setattr("opengyre.training.forward.LOGITS_AT_ONCE", 64 * 7)
    blocks = forward.logprobs(packed)
    assert float((whole - blocks).abs().max().detach()) <= 1e-14
    for a, b in zip(gradients(model, whole.sum()), gradients(model, blocks.sum()), strict=True):
        assert float((a - b).abs().max()) <= 1e-12


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def mistral():
    return MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=9))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def gemma2():
    """Soft-capped logits and attention: neither trees nor a bare head."""
    caps = {"final_logit_softcapping": 0.2, "attn_logit_softcapping": 0.2, "initializer_range": 0.3}
    config = Gemma2Config(**SMALL, **caps, num_key_value_heads=2, head_dim=8, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("build", [llama, mistral, gpt2, gemma2])
def test_any_model(build):
    torch.manual_seed(0)
    model = build().eval()
    before = model.config._attn_implementation
    forward = Forward(model)
    if build is gemma2:
        assert not forward.trees and not forward.head_split
    else:
        assert forward.trees and forward.head_split
    samples = random_samples(4)
    packs = forward.plan(samples, 90)
    assert len(packs) > 1
    for packed in packs:
        want = separate(forward, list(packed.samples))
        assert float((forward.logprobs(packed) - want).abs().max().detach()) < 1e-5
        assert float((forward.logprobs(packed, 16) - want).abs().max().detach()) < 1e-5
    assert model.config._attn_implementation == before
