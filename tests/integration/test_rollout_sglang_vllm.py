"""Engine clients against servers with the wire as measured: what is recorded is what the server sampled, or nothing."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_servers import EngineServer, SglangServer, VllmServer, logprob
from engines import until
from opengyre.errors import ConfigError, EngineError
from opengyre.proxy.sampled import Sampled
from opengyre.rollout.base import GenerateRequest, RequestRefused, TokenChunk
from opengyre.rollout.http import HttpEngine
from opengyre.rollout.http_check import Logprobs, check_logprobs, read_logprobs
from opengyre.rollout.http_kinds import connect
from opengyre.rollout.sglang import SglangEngine
from opengyre.rollout.vllm import VllmEngine

GOLDEN = Path(__file__).parent.parent / "golden" / "engines"
SAID = [11, 12, 13, 14, 15, 2]
WAYS = ("sglang", "sglang_cumulative", "vllm", "vllm_completions")


def make(way: str, **options: Any) -> tuple[EngineServer, type[HttpEngine]]:
    if way.startswith("sglang"):
        return SglangServer(lambda _: SAID, incremental=way == "sglang", **options), SglangEngine
    return VllmServer(lambda _: SAID, scale_out=way == "vllm", **options), VllmEngine


@asynccontextmanager
async def up(way: str, **options: Any):
    server, kind = make(way, **options)
    await server.start()
    engine = kind("e0", server.url)
    try:
        await engine.describe()
        yield server, engine
    finally:
        await engine.close()
        await server.stop()


def asks(number: int = 0, **options: Any) -> GenerateRequest:
    base = {"prompt_ids": [5, 6, 7], "max_new_tokens": 50, "stop_token_ids": [2], "temperature": 0.7}
    return GenerateRequest(f"{number:036d}", "s", **{**base, **options})


async def take(engine: HttpEngine, request: GenerateRequest) -> tuple[Sampled, TokenChunk]:
    sampled, last = Sampled(), None
    async for chunk in engine.generate(request):
        sampled.add(chunk, engine.name)
        last = chunk
    assert last is not None
    return sampled, last


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_gives_the_ids_and_logprobs_the_server_sampled(way):
    async with up(way) as (server, engine):
        server.version = "7"
        await engine.load()
        sampled, last = await take(engine, asks())
        (span,) = sampled.spans()
        assert span.ids.tolist() == SAID and span.version == 7 and span.cell == "e0" and last.finish == "stop"
        assert span.logprobs.tolist() == [logprob(n) for n in range(len(SAID))]
        assert sampled.usable
        sampled, last = await take(engine, asks(max_new_tokens=3))
        assert sampled.ids == SAID[:3] and last.finish == "length"


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_left_to_the_server_that_would_bend_the_distribution(way):
    async with up(way) as (server, engine):
        await take(engine, asks())
        body = server.requests[-1]
        sampling = body.get("sampling_params", body)
        assert sampling["temperature"] == 0.7 and sampling["stop_token_ids"] == [2]
        for name, value in {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}.items():
            assert sampling[name] == value
        assert sampling["frequency_penalty"] == sampling["presence_penalty"] == 0.0 and sampling["top_k"] in (-1, 0)


@pytest.mark.parametrize("way", WAYS)
async def test_logprobs_of_another_number_than_ids_are_kept_and_never_trained(way):  # P13, P14
    async with up(way) as (server, engine):
        server.skew = 1
        sampled, _ = await take(engine, asks())
        assert sampled.ids == SAID and not sampled.usable and sampled.gaps
        (span,) = sampled.spans()
        assert not span.trainable and math.isnan(span.logprobs[-1])


async def test_ids_that_the_stream_lost_make_the_call_untrainable():  # P13
    async with up("sglang") as (server, engine):
        server.lose = 3
        sampled, last = await take(engine, asks())
        assert last.finish == "stop" and sampled.gaps and not sampled.usable


async def test_events_that_grew_while_they_were_written_are_read_right():
    async with up("sglang_cumulative") as (server, engine):
        server.coalesce = True
        sampled, _ = await take(engine, asks())
        assert sampled.ids == SAID and sampled.usable
        assert sampled.spans()[0].logprobs.tolist() == [logprob(n) for n in range(len(SAID))]


async def test_a_number_that_stands_for_a_missing_logprob_is_missing():
    for way in ("vllm", "vllm_completions"):
        async with up(way) as (server, engine):
            server.sentinel_at = 2
            sampled, _ = await take(engine, asks())
            assert not sampled.usable and sampled.not_finite == 1 and sampled.ids == SAID


@pytest.mark.parametrize("way", ["sglang", "sglang_cumulative", "vllm"])
async def test_an_update_in_the_middle_of_a_call_is_recorded_token_by_token(way):  # N11
    async with up(way) as (server, engine):
        server.version = "3"
        await engine.load()
        server.on_token = lambda n: setattr(server, "version", "4" if n >= 4 else "3")
        sampled, last = await take(engine, asks())
        assert [(s.version, len(s)) for s in sampled.spans()] == [(3, 4), (4, 2)]
        assert last.versions == [(3, 4), (4, 2)] and sampled.ids == SAID


async def test_a_server_without_versions_has_the_one_it_was_told():
    async with up("vllm_completions", dev=False) as (server, engine):
        engine.version = 9
        sampled, _ = await take(engine, asks())
        assert sampled.spans()[0].version == 9 and server.requests[-1]["cache_salt"] == "weights-9"
        assert (await engine.load()).version == 9


@pytest.mark.parametrize("way", WAYS)
async def test_closing_the_iterator_frees_the_server_at_once(way):  # P22
    async with up(way) as (server, engine):
        server.say = lambda _: list(range(3, 5000))
        async with aclosing(engine.generate(asks(1, max_new_tokens=6000))) as chunks:
            await anext(chunks)
            assert len(server.running) == 1
            server.gate.clear()
        await until(lambda: not server.running)


async def test_an_abort_from_elsewhere_keeps_what_was_sampled():  # X01
    for way in ("sglang", "sglang_cumulative"):
        async with up(way) as (server, engine):
            server.on_token = lambda n, server=server: server.gate.clear() if n == 3 else None
            task = asyncio.create_task(take(engine, asks(2)))
            await server.until_sampled(3)
            await engine._abort("0")  # as an abort of all does
            sampled, last = await task
            assert last.finish == "aborted" and sampled.ids == SAID[:3] and sampled.usable


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_overloaded_server_is_an_engine_error(way, status):
    async with up(way) as (server, engine):
        server.status = status
        with pytest.raises(EngineError, match=str(status)) as caught:
            await take(engine, asks())
        assert not isinstance(caught.value, RequestRefused)


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_will_never_do_is_told_from_a_bad_moment(way):
    async with up(way, context=3) as (_, engine):
        with pytest.raises(RequestRefused):
            await take(engine, asks(prompt_ids=[1, 2, 3, 4]))


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_dies_is_an_engine_error_and_its_tokens_stay(way):
    async with up(way) as (server, engine):
        server.die_after = 2
        sampled = Sampled()
        with pytest.raises(EngineError):
            async for chunk in engine.generate(asks()):
                sampled.add(chunk, "e0")
        assert sampled.ids == SAID[:2] and sampled.usable
        await server.stop()
        with pytest.raises(EngineError):
            await take(engine, asks())
        with pytest.raises(EngineError):
            await engine.load()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_server_that_hangs_can_be_abandoned(answers):
    async with up("vllm") as (server, engine):
        server.gate.clear()
        server.deaf = not answers
        task = asyncio.create_task(take(engine, asks()))
        await until(lambda: server.requests)
        engine.abandon("missed three health checks")
        with pytest.raises(EngineError, match="missed three health checks"):
            await task
        server.gate.set()


@pytest.mark.parametrize("way", WAYS)
async def test_logprobs_before_temperature_are_told(way):  # N08
    async with up(way) as (server, engine):
        assert await check_logprobs(engine, [[1, 2]]) is Logprobs.AFTER_TEMPERATURE
        assert server.top(0.5)[0][1] == pytest.approx(-0.0206, abs=1e-3)
        server.raw = True
        assert server.top(0.5)[0][1] == pytest.approx(-0.1699, abs=1e-3)
        assert await check_logprobs(engine, [[1, 2]]) is Logprobs.BEFORE_TEMPERATURE


def test_values_that_are_no_logprobs_are_told():
    assert read_logprobs([4.0, 0.0, -2.0], [1.0, 0.0, -0.5]) is Logprobs.NOT_NORMALISED
    assert read_logprobs([-0.1, -0.2, -0.3], [-0.1, -0.2, -0.3]) is Logprobs.NOT_NORMALISED
    assert read_logprobs([-2.0] * 5, [-2.0] * 5) is Logprobs.UNKNOWN


def test_what_a_real_vllm_said_before_temperature_is_told():
    said = json.loads((GOLDEN / "vllm_logprobs_before_temperature.json").read_text())
    assert read_logprobs(said["cold"], said["hot"]) is Logprobs.BEFORE_TEMPERATURE


@pytest.mark.parametrize(
    ("name", "finish", "spans"),
    [
        ("sglang_incremental", "stop", [(0, 7)]),
        ("sglang_incremental_update", "length", [(0, 8), (1, 32)]),
        ("sglang_incremental_abort", "aborted", [(1, 8)]),
        ("sglang_cumulative", "stop", [(0, 7)]),
        ("sglang_cumulative_update", "length", [(0, 7), (1, 33)]),
        ("sglang_cumulative_abort", "aborted", [(1, 8)]),
        ("vllm_generate", "stop", [(3, 7)]),  # its label is "default": what the engine was told counts
        ("vllm_completions", "stop", [(3, 7)]),
        ("vllm_update", "stop", [(3, 14), (4, 13)]),
        ("vllm_abort", "aborted", [(4, 6)]),
    ],
)
def test_what_a_real_server_streamed_is_read(name, finish, spans):
    engine = (SglangEngine if name.startswith("sglang") else VllmEngine)("e0", "http://unused")
    engine.version = 3
    reader, sampled, last = engine._reader(asks()), Sampled(), None
    for line in (GOLDEN / f"{name}.sse").read_text().splitlines():
        if line.startswith("data: {") and (chunk := reader.take(line[6:].encode())) is not None:
            sampled.add(chunk, "e0")
            last = chunk
    assert last is not None and last.finish == finish and sampled.usable
    assert [(s.version, len(s)) for s in sampled.spans()] == spans


async def test_the_kind_of_a_server_is_found_out():
    sglang, vllm = make("sglang")[0], make("vllm")[0]
    await sglang.start()
    await vllm.start()
    try:
        engines = await connect([sglang.url, vllm.url + "/"], "auto")
        assert [e.kind for e in engines] == ["sglang", "vllm"] and engines[1].name == f"127.0.0.1:{vllm.port}"
        await vllm.stop()
        engines = await connect([sglang.url, vllm.url], "auto")  # still loading: of the kind of the others
        assert [e.kind for e in engines] == ["sglang", "sglang"]
        with pytest.raises(ConfigError, match="does not answer"):
            await connect([vllm.url], "auto")
        with pytest.raises(ConfigError, match="given twice"):
            await connect([sglang.url, sglang.url + "/"], "auto")
        with pytest.raises(ConfigError, match="http://host:port"):
            await connect(["localhost:1"], "auto")
        sglang.owner = "somebody"
        with pytest.raises(ConfigError, match="'somebody'"):
            await connect([sglang.url], "auto")
    finally:
        await sglang.stop()
        await vllm.stop()
