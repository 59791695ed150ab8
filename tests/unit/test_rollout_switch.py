"""Role switches as the embedded engine sees them: preemption, KV hand-over, released regions, new weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from opengyre.errors import EngineError
from rollout_making import Heard, assert_logprobs, make_engine, make_model, plain_logprobs, request, tokens


def reweigh(model: Any, seed: int) -> None:
    """Replace the weights in place, as a trainer does."""
    model.load_state_dict(make_model(dtype=next(model.parameters()).dtype, seed=seed).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_preempted_calls_continue_elsewhere_from_their_kv(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    here, there = make_engine(model, max_batch=2), make_engine(model)
    heard = Heard()
    prompts = {f"c{i}": tokens(i, 30 + i) for i in range(4)}
    for call_id, prompt in prompts.items():
        here.submit(request(call_id, prompt, new=20))
    while len(heard.ids("c1")) < 3:
        heard.add(here.step())
    heard.add(here.preempt(export_kv=True))
    assert not here.busy and here.load().running == here.load().waiting == 0
    assert {heard.finish(c) for c in prompts} == {"preempted"}
    done = {c: heard.ids(c) for c in prompts}
    for call_id, prompt in prompts.items():
        export = here.take_export(call_id)
        assert here.take_export(call_id) is None
        ids = prompt + done[call_id]
        if done[call_id]:
            assert export is not None and export.ids == ids[:-1]  # all but the last sampled token has KV
            assert there.import_kv(export.ids, export.arrays, export.version) > 0
        else:
            assert export is None
        there.submit(request(call_id, ids, new=20 - len(done[call_id])))
    heard.run(there)
    assert there.metrics.imported_tokens == sum(30 + i + len(done[f"c{i}"]) - 1 for i in range(2))
    assert there.metrics.cached_tokens >= there.metrics.imported_tokens
    for call_id, prompt in prompts.items():
        assert len(heard.ids(call_id)) == 20
        if dtype != torch.bfloat16:
            assert_logprobs(model, prompt, heard, call_id)


def test_an_idle_sessions_kv_can_be_exported_by_its_ids() -> None:
    model = make_model(dtype=torch.float64)
    here, there, heard = make_engine(model), make_engine(model), Heard()
    prompt = tokens(1, 40)
    here.submit(request("c", prompt))
    heard.run(here)
    export = here.export_kv([*prompt, *heard.ids("c"), 5, 6])
    assert export is not None and len(export.ids) == 40 + 11
    assert here.export_kv([60]) is None or here.export_kv([60]).ids == [60]
    assert there.import_kv(export.ids, export.arrays, export.version) == 51
    assert there.import_kv(export.ids, export.arrays, export.version) == 0  # held already
    longer = [*prompt, *heard.ids("c"), 5, 6]
    there.submit(request("d", longer))
    assert_logprobs(model, longer, heard.run(there), "d")
    assert heard.chunks["d"][0].cached_tokens == 51


def test_kv_of_another_version_or_shape_is_refused_and_counted() -> None:
    model = make_model()
    here, there = make_engine(model), make_engine(model, version=1)
    here.submit(request("c", tokens(1, 40)))
    Heard().run(here)
    export = here.export_kv(tokens(1, 40))
    assert export is not None
    assert there.import_kv(export.ids, export.arrays, export.version) == 0
    broken = {**export.arrays, "k1": export.arrays["k1"].astype(np.float64)}
    assert there.import_kv(export.ids, broken, 1) == 0
    assert there.import_kv(export.ids[:-1], export.arrays, 1) == 0
    assert there.import_kv(export.ids, {}, 1) == 0
    assert there.metrics.imports_refused == 4 and there.load().kv_tokens == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["weights", "kv", "version"])))
def test_c02_x03_serves_only_when_every_region_is_back_and_the_weights_were_set(order: tuple[str, ...]) -> None:
    engine, heard = make_engine(make_model()), Heard()
    engine.submit(request("before", tokens(1, 30)))
    heard.run(engine)
    engine.release({"weights", "kv"})
    assert engine.load().kv_tokens == 0 and not engine.load().serving
    for number, event in enumerate(order):
        with pytest.raises(EngineError, match="not serving"):
            engine.submit(request(f"early{number}", tokens(1, 30)))
        if event == "version":
            engine.set_version(5)
        else:
            engine.resume({event})
    assert engine.load().serving
    engine.submit(request("after", tokens(1, 30)))
    heard.run(engine)
    assert set(heard.versions("after")) == {5} and heard.ids("after") == heard.ids("before")


def test_x03_waking_without_an_update_keeps_refusing_and_kv_alone_needs_none() -> None:
    engine = make_engine(make_model())
    engine.release({"kv"})
    engine.resume({"kv"})
    assert engine.serving
    engine.release({"weights"})
    engine.resume({"weights", "kv"})
    with pytest.raises(EngineError, match="weights version"):
        engine.submit(request("c", [1]))
    engine.set_version(engine.version)  # an update to the version it had is an update
    engine.submit(request("c", [1]))
    with pytest.raises(EngineError, match="unknown region"):
        engine.release({"graphs"})


def test_x06_a_release_with_calls_in_flight_stops_them_and_frees_the_memory() -> None:
    engine, heard = make_engine(make_model(), max_batch=2, emit_every=50), Heard()
    for i in range(3):
        engine.submit(request(f"c{i}", tokens(i, 40), new=60))
    for _ in range(9):
        heard.add(engine.step())
    engine.release({"kv"})
    assert engine.busy and engine.load().kv_tokens == 0
    assert not engine._rows.keys and not engine._cache.tokens
    heard.add(engine.step())
    assert [heard.finish(f"c{i}") for i in range(3)] == ["preempted"] * 3 and len(heard.ids("c0")) > 0
    assert not engine.busy and engine.step() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_n11_running_calls_go_on_under_new_weights_and_each_token_has_its_version(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    engine, heard = make_engine(model, version=3, emit_every=16, max_batch=2), Heard()
    prompts = {f"c{i}": tokens(i, 30 + 7 * i) for i in range(3)}
    for call_id, prompt in prompts.items():
        engine.submit(request(call_id, prompt, new=40))
    for _ in range(12):
        heard.add(engine.step())
    reweigh(model, 1)
    engine.set_version(4)
    assert engine.load().kv_tokens == 0
    heard.run(engine)
    weights = {3: make_model(dtype=dtype, seed=0), 4: model}
    assert {3, 4} == set(heard.versions("c0"))
    for call_id, prompt in prompts.items():
        ids, versions = heard.ids(call_id), heard.versions(call_id)
        assert len(ids) == 40 and versions == sorted(versions)
        for version, plain in weights.items():
            greedy = plain_logprobs(plain, prompt, ids)
            for k, token in enumerate(ids):
                if versions[k] == version:
                    assert token == int(greedy[k].argmax())
                    assert heard.logprobs(call_id)[k] == pytest.approx(float(greedy[k, token]), abs=1e-5)


def test_setting_the_same_version_keeps_the_kv() -> None:
    engine = make_engine(make_model(), version=2)
    engine.submit(request("c", tokens(1, 30)))
    Heard().run(engine)
    held = engine.load().kv_tokens
    engine.set_version(2)
    assert engine.load().kv_tokens == held > 0
