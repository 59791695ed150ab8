"""Two engines under random submissions, aborts, preemptions, releases and new weights, against a naive reference.

Every token of every call must be the greedy choice of a plain forward on the weights version it is stamped with, with
that forward's log-probability, whatever happened to the call on its way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opengyre.rollout import torch_engine
from opengyre.rollout.torch_engine import TorchEngine
from rollout_making import Heard, make_engine, make_model, plain_logprobs, request, tokens

NEW = 11
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 40)),  # shared prefix, prompt length
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 40)),
    st.tuples(st.just("turn"), st.integers(0, 30), st.integers(1, 5)),  # which call goes on, new prompt tokens
    st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("move"), st.booleans(), st.booleans()),  # export KV, release and resume after
    st.tuples(st.just("version"), st.just(0), st.just(0)),
)


class Pair:
    """A serving engine and a spare one on the same module, and what their calls said."""

    def __init__(self, model: Any, weights: list[dict[str, torch.Tensor]], **sizes: Any) -> None:
        self.model, self.weights, self.version = model, weights, 0
        model.load_state_dict(weights[0])
        self.engines = [make_engine(model, **sizes), make_engine(model, **sizes)]
        self.heard = Heard()
        self.prompts: dict[str, list[int]] = {}

    @property
    def serving(self) -> TorchEngine:
        return self.engines[0]

    def submit(self, prefix: int, length: int) -> None:
        call_id = f"c{len(self.prompts)}"
        self.prompts[call_id] = tokens(prefix, length)
        self.serving.submit(request(call_id, self.prompts[call_id], new=NEW))

    def turn(self, number: int, new: int) -> None:
        """The next turn of a call that finished."""
        before = f"c{number}"
        if self.heard.finish(before) != "length":
            return
        prompt = [*self.prompts[before], *self.heard.ids(before), *tokens(number, new)]
        if len(prompt) + NEW < 64:
            call_id = f"c{len(self.prompts)}"
            self.prompts[call_id] = prompt
            self.serving.submit(request(call_id, prompt, new=NEW))

    def step(self) -> None:
        self.heard.add(self.serving.step())
        load = self.serving.load()
        assert load.kv_tokens <= self.serving.kv_tokens and load.running <= self.serving.max_batch

    def move(self, export: bool, release: bool) -> None:
        """The serving engine leaves the role; its calls continue on the other."""
        here, there = self.engines
        stopped = here.preempt(export_kv=export)
        self.heard.add(stopped)
        self.engines.reverse()
        for call_id, chunk in stopped:
            if chunk.finish != "preempted":
                continue
            done = self.heard.ids(call_id)
            if kv := here.take_export(call_id):
                there.import_kv(kv.ids, kv.arrays, kv.version)
            there.submit(request(call_id, self.prompts[call_id] + done, new=NEW - len(done)))
        if release:
            here.release({"weights", "kv"})
            assert here.load().kv_tokens == 0
            here.resume({"kv", "weights"})
            here.set_version(self.version)

    def new_version(self) -> None:
        self.version += 1
        self.model.load_state_dict(self.weights[self.version % len(self.weights)])
        for engine in self.engines:
            engine.set_version(self.version)

    def check(self, aborted: set[str], reference: Any) -> None:
        for call_id, prompt in self.prompts.items():
            ids, versions = self.heard.ids(call_id), self.heard.versions(call_id)
            assert self.heard.finish(call_id) == ("aborted" if call_id in aborted else "length")
            assert call_id in aborted or len(ids) == NEW
            for version in set(versions):
                reference.load_state_dict(self.weights[version % len(self.weights)])
                expected = plain_logprobs(reference, prompt, ids)
                for k in range(len(ids)):
                    if versions[k] == version:
                        best = float(expected[k].max())
                        assert float(expected[k, ids[k]]) >= best - self.tolerance
                        assert abs(self.heard.logprobs(call_id)[k] - best) <= self.tolerance

    @property
    def tolerance(self) -> float:
        return 1e-10 if next(self.model.parameters()).dtype == torch.float64 else 2e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # the model's own forward, and the direct one
def test_whatever_happens_to_a_call_its_tokens_are_the_naive_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "HEADROOM", 0)  # admit too much, so that memory does run out
    model, reference = make_model(dtype=dtype), make_model(dtype=dtype)
    weights = [make_model(dtype=dtype, seed=seed).state_dict() for seed in range(2)]

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(ACTIONS, max_size=25), st.sampled_from([70, 150, 600]), st.sampled_from([3, 16, 64]))
    def check(actions: list[tuple[str, Any, Any]], kv_tokens: int, chunk: int) -> None:
        pair = Pair(model, weights, kv_tokens=kv_tokens, prefill_chunk=chunk, max_batch=3, context=64, emit_every=2)
        aborted: set[str] = set()
        for what, a, b in actions:
            if what == "submit":
                pair.submit(a, b)
            elif what == "step":
                for _ in range(a):
                    pair.step()
            elif what == "abort" and f"c{a}" in pair.prompts and pair.heard.finish(f"c{a}") in (None, "preempted"):
                pair.serving.abort(f"c{a}")
                aborted.add(f"c{a}")
                pair.step()
            elif what == "turn":
                pair.turn(a, b)
            elif what == "move":
                pair.move(a, b)
            elif what == "version":
                pair.new_version()
        for _ in range(2000):  # far more than the calls need: a call that starves fails the test instead of hanging it
            if not pair.serving.busy:
                break
            pair.step()
        assert not pair.serving.busy and pair.serving.load().running == 0 and pair.serving.load().waiting == 0
        pair.check(aborted, reference)

    check()
