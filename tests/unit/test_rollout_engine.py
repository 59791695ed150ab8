"""The embedded engine: what it samples, what it records, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from opengyre.errors import EngineError
from opengyre.rollout.torch_direct import DirectRunner
from opengyre.rollout.torch_model import HFRunner
from rollout_making import (
    CONFIGS,
    Heard,
    assert_logprobs,
    make_engine,
    make_model,
    plain_logprobs,
    request,
    tokens,
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_decoder_gives_the_tokens_and_logprobs_of_its_own_forward(kind: str) -> None:
    model = make_model(kind)
    engine = make_engine(model, prefill_chunk=11)
    heard = Heard()
    for i in range(6):  # more than max_batch, of different length, past the sliding windows of 20
        engine.submit(request(f"c{i}", tokens(i, 5 + 9 * i), new=14))
    heard.run(engine)
    for i in range(6):
        prompt, ids = tokens(i, 5 + 9 * i), heard.ids(f"c{i}")
        assert len(ids) == 14 and heard.finish(f"c{i}") == "length"
        assert ids == plain_logprobs(model, prompt, ids).argmax(-1).tolist()
        assert_logprobs(model, prompt, heard, f"c{i}")


def test_the_direct_forward_is_taken_for_float32_and_the_models_own_for_float64() -> None:
    assert isinstance(make_engine(make_model("qwen3")).runner, DirectRunner)
    assert isinstance(make_engine(make_model("llama")).runner, DirectRunner)
    assert isinstance(make_engine(make_model("qwen3", torch.float64)).runner, HFRunner)
    assert isinstance(make_engine(make_model("qwen3"), fast=False).runner, HFRunner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_n08_logprobs_are_taken_after_the_temperature(dtype: torch.dtype, temperature: float) -> None:
    model = make_model(dtype=dtype)
    engine = make_engine(model)
    prompts = {f"c{i}": tokens(i, 40 + i) for i in range(5)}
    for call_id, prompt in prompts.items():
        engine.submit(request(call_id, prompt, new=30, temperature=temperature))
    heard = Heard().run(engine)
    for call_id, prompt in prompts.items():
        assert_logprobs(model, prompt, heard, call_id, temperature)


def test_a_cached_prefix_is_used_across_turns_and_sessions_and_changes_no_logprob() -> None:
    model = make_model(dtype=torch.float64)
    engine, heard = make_engine(model), Heard()
    first = tokens(1, 50)
    engine.submit(request("t1", first, temperature=1.0))
    heard.run(engine)
    assert heard.chunks["t1"][0].cached_tokens == 0
    second = [*first, *heard.ids("t1"), *tokens(2, 20)]
    engine.submit(request("t2", second, temperature=1.0))
    forked = [*first[:30], *tokens(3, 30)]
    engine.submit(request("t3", forked, temperature=1.0, session="other"))
    heard.run(engine)
    # all but the last sampled token of turn 1 has KV; the fork shares 30 tokens
    assert heard.chunks["t2"][0].cached_tokens == len(first) + 11
    assert heard.chunks["t3"][0].cached_tokens == 30
    for call_id, prompt in (("t2", second), ("t3", forked)):
        assert_logprobs(model, prompt, heard, call_id)
    assert engine.metrics.cached_tokens == len(first) + 11 + 30
    assert engine.metrics.prefill_tokens == 50 + 21 + 30


def test_a_group_that_starts_together_computes_its_prompt_once() -> None:
    engine = make_engine(make_model())
    for i in range(4):
        engine.submit(request(f"c{i}", tokens(1, 60), seed=i, temperature=1.0))
    heard = Heard().run(engine)
    assert engine.metrics.prefill_tokens == 60 + 3  # each still computes its last token: it yields the logits
    assert len({tuple(heard.ids(f"c{i}")) for i in range(4)}) > 1


def test_a_seeded_call_samples_the_same_whatever_shares_the_batch_and_after_moving() -> None:
    model = make_model(dtype=torch.float64)
    prompt = tokens(4, 33)
    alone = Heard()
    engine = make_engine(model)
    engine.submit(request("c", prompt, new=20, temperature=1.0, seed=7))
    alone.run(engine)

    crowd, engine = Heard(), make_engine(model, seed=99)
    for i in range(3):
        engine.submit(request(f"x{i}", tokens(i, 10), new=9, temperature=0.8))
    engine.submit(request("c", prompt, new=20, temperature=1.0, seed=7))
    while len(crowd.ids("c")) < 6:
        crowd.add(engine.step())
    crowd.add(engine.preempt(export_kv=False))
    done = crowd.ids("c")
    other = make_engine(model)
    other.submit(request("c", prompt + done, new=20 - len(done), temperature=1.0, seed=7))
    crowd.run(other)
    assert crowd.ids("c") == alone.ids("c")


def test_sampling_follows_the_distribution() -> None:
    model = make_model()
    engine = make_engine(model, max_batch=64, kv_tokens=4000)
    prompt, n = tokens(5, 12), 800
    for i in range(n):
        engine.submit(request(f"c{i}", prompt, new=1, temperature=1.0))
    heard = Heard().run(engine)
    expected = plain_logprobs(model, prompt, [0]).exp()[0]
    counts = torch.zeros_like(expected)
    for i in range(n):
        counts[heard.ids(f"c{i}")[0]] += 1
    likely = expected > 0.02
    chi2 = ((counts - n * expected)[likely] ** 2 / (n * expected[likely])).sum()
    assert chi2 < 2.5 * likely.sum()  # the seed is fixed: this fails for a wrong sampler, not by chance


def test_top_k_and_top_p_restrict_what_is_drawn_and_leave_the_logprob() -> None:
    model = make_model()
    engine = make_engine(model, max_batch=16, kv_tokens=3000)
    prompt = tokens(6, 12)
    for i in range(40):
        engine.submit(request(f"k{i}", prompt, new=1, temperature=1.0, top_k=2))
        engine.submit(request(f"p{i}", prompt, new=1, temperature=1.0, top_p=0.3))
    heard = Heard().run(engine)
    order = plain_logprobs(model, prompt, [0])[0].sort(descending=True)
    nucleus = order.indices[: int((order.values.exp().cumsum(0) < 0.3).sum()) + 1].tolist()
    assert {heard.ids(f"k{i}")[0] for i in range(40)} == set(order.indices[:2].tolist())
    assert {heard.ids(f"p{i}")[0] for i in range(40)} <= set(nucleus)
    assert_logprobs(model, prompt, heard, "k0")


def test_finishes_stop_and_length_and_context() -> None:
    model = make_model()
    engine = make_engine(model, context=64)
    heard = Heard()
    engine.submit(request("free", tokens(1, 20), new=10, temperature=1.0, seed=3))
    heard.run(engine)
    ids = heard.ids("free")
    at = next(i for i in range(1, 10) if ids[i] not in ids[:i])
    engine.submit(request("stop", tokens(1, 20), new=10, temperature=1.0, seed=3, stop_token_ids=[ids[at]]))
    engine.submit(request("full", tokens(2, 60), new=100))
    heard.run(engine)
    assert heard.finish("free") == "length"
    assert heard.ids("stop") == ids[: at + 1] and heard.finish("stop") == "stop"  # the stop token is part of the ids
    assert len(heard.ids("full")) == 4 and heard.finish("full") == "length"


def test_chunks_hold_emit_every_tokens_and_the_last_flushes() -> None:
    engine = make_engine(make_model(), emit_every=5)
    engine.submit(request("c", tokens(1, 10), new=12))
    heard = Heard().run(engine)
    assert [len(c.ids) for c in heard.chunks["c"]] == [5, 5, 2]
    assert [c.finish for c in heard.chunks["c"]] == [None, None, "length"]


def test_what_can_never_be_served_is_refused_with_the_figures() -> None:
    engine = make_engine(make_model(), context=100, kv_tokens=80)
    for bad, figure in (
        (request("c", []), "empty"),
        (request("c", tokens(1, 80)), "at most 79"),
        (request("c", [3, 61]), "61"),
        (request("c", [3, -1]), "-1"),
        (request("c", [3], new=0), "max_new_tokens is 0"),
        (request("c", [3], temperature=-1.0), "temperature -1.0"),
    ):
        with pytest.raises(EngineError, match=figure):
            engine.submit(bad)
    engine.submit(request("c", tokens(1, 79)))
    with pytest.raises(EngineError, match="already here"):
        engine.submit(request("c", [3]))
    assert len(Heard().run(engine).ids("c")) == 1


def test_p22_an_abort_leaves_nothing() -> None:
    engine = make_engine(make_model(), max_batch=2, emit_every=100)
    heard = Heard()
    for i in range(4):
        engine.submit(request(f"c{i}", tokens(i, 40), new=50))
    for _ in range(8):
        heard.add(engine.step())
    for i in range(4):  # running, running, waiting, waiting
        engine.abort(f"c{i}")
    engine.abort("unknown")
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    heard.add(engine.step())
    assert [heard.finish(f"c{i}") for i in range(4)] == ["aborted"] * 4
    assert not engine.busy and engine.step() == []
    held = engine.load().kv_tokens  # the prompts, as cached prefixes; nothing of what was abandoned
    assert held == 80
    engine.submit(request("c0", tokens(0, 40), new=3))
    assert len(heard_ids := Heard().run(engine).ids("c0")) == 3 and heard_ids == heard.ids("c0")[:3]


def test_batch_and_memory_limits_hold_and_everybody_finishes() -> None:
    model = make_model()
    engine = make_engine(model, kv_tokens=100, max_batch=3, context=90, prefill_chunk=13)
    heard = Heard()
    prompts = {f"c{i}": tokens(i, 20 + 3 * i) for i in range(7)}
    for call_id, prompt in prompts.items():
        engine.submit(request(call_id, prompt, new=40))
    while engine.busy:
        heard.add(engine.step())
        load = engine.load()
        assert load.running <= 3 and load.kv_tokens <= 100
    assert engine.metrics.retracted_calls > 0  # it was tight
    for call_id, prompt in prompts.items():
        assert len(heard.ids(call_id)) == 40
        assert_logprobs(model, prompt, heard, call_id)
