"""Whatever is sent, the proxy answers in form, and nobody else notices. ``benchmarks/proxy_fuzz.py`` sends 100,000."""

from __future__ import annotations

import asyncio
import gzip
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from door import opened
from fuzzing import fuzz
from mutations import HISTORY, PATHS
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.dialects.responses import Responses
from opengyre.proxy.history import History
from opengyre.proxy.reader import read
from opengyre.proxy.refusals import Refusal

DIALECTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}
by_dialect = pytest.mark.parametrize("name", DIALECTS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = "role content type text input id name tool_calls function arguments output custom namespace thinking"
KINDS = "user assistant system tool tool_use tool_result function_call reasoning message custom_tool_call_output"
WORDS = st.sampled_from(KEYS.split() + KINDS.split())
ENTRIES = st.lists(st.dictionaries(WORDS, WORDS | VALUES | st.lists(st.dictionaries(WORDS, WORDS | VALUES))))


async def test_a_few_hundred_mutated_requests(tmp_path):
    report = await fuzz(tmp_path, 400, seed=11, workers=4, failures=0.01)
    assert not report.failures, report.failures[0]
    assert report.statuses["200"] > 50 and report.statuses["400"] > 50 and report.statuses["canary turns"] > 10


@by_dialect
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries=ENTRIES, tools=VALUES | ENTRIES, more=st.dictionaries(WORDS, VALUES, max_size=3))
def test_any_json_is_read_or_refused(name, entries, tools, more):
    body = json.dumps({"model": "m", "tools": tools, **more, HISTORY[name]: entries}).encode()
    try:
        request = read(DIALECTS[name], History(), body)
    except Refusal as refusal:
        assert refusal.status == 400 and str(refusal)
    else:
        assert len(request.keys) == len(request.conversation.messages)


@by_dialect
@settings(max_examples=50, deadline=None)
@given(body=st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_or_refused(name, body):
    try:
        read(DIALECTS[name], History(), body)
    except Refusal as refusal:
        assert refusal.status == 400


DEEP = {
    "brackets": b"[" * 200_000,
    "objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "history": b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b',"input":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "not a number": b'{"model":"m","max_tokens":NaN,"max_output_tokens":NaN,"messages":[],"input":[]}',
    "too large a number": b'{"max_tokens":1e999,"max_output_tokens":1e999,"messages":[],"input":[]}',
    "half a pair in UTF-8": b'{"model":"\xed\xa0\x80","messages":[],"input":[]}',
    "digits": b'{"max_tokens":' + b"9" * 100_000 + b"}",
    "utf-16": '{"model":"m"}'.encode("utf-16"),
    "broken utf-8": b'{"model":"\xff\xfe"}',
    "nothing": b"",
    "twice": b'{"messages":[{"role":"robot"}],"messages":[],"input":[{"role":"robot"}],"input":[]}',
}


async def test_hostile_bodies_are_refused(tmp_path):
    async with opened(tmp_path) as door:
        engine = door.engine()
        for path in PATHS.values():
            for case, body in DEEP.items():
                async with door.http.post(f"{door.url}{path}", data=body, headers={"x-api-key": door.key}) as response:
                    assert response.status == 400, (case, await response.text())
                    assert (await response.json())["error"]["message"]
        assert not engine.requests and door.session.counters.refused == len(PATHS) * len(DEEP)


async def test_deep_arguments_are_recorded_or_refused(tmp_path):
    """A depth that can be read can also be rendered, recorded and stored: there is no 529 that comes back for ever."""
    async with opened(tmp_path) as door:
        door.engine()
        for depth in (100, 300, 500, 900):
            for name, body in deep_arguments(depth).items():
                calls, headers = len(door.session.tree.calls()), {"x-api-key": door.key}
                async with door.http.post(f"{door.url}{PATHS[name]}", data=body, headers=headers) as response:
                    assert response.status in (200, 400), (name, depth, await response.text())
                assert depth > 100 or response.status == 200
                assert len(door.session.tree.calls()) - calls == (response.status == 200)


def deep_arguments(depth: int) -> dict[str, str]:
    nested = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": nested}}
    item = {"type": "function_call", "name": "f", "arguments": nested, "call_id": "t"}
    go = {"role": "user", "content": f"go {depth}"}
    use = '{"type":"tool_use","id":"t","name":"f","input":' + nested + "}"
    return {
        "messages": '{"messages":[{"role":"assistant","content":[' + use + "]}," + json.dumps(go) + "]}",
        "chat": json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}, go, go]}),
        "responses": json.dumps({"input": [item, go, go, go]}),
    }


async def test_bodies_that_are_not_in_their_encoding(tmp_path):
    async with opened(tmp_path) as door:
        door.engine()
        body = b'{"messages":[{"role":"user","content":"go"}]}'
        packed = gzip.compress(body)
        cases = [("gzip", body, 400), ("gzip", packed[:-9], 400), ("gzip", packed + b"x", 400), ("gzip", packed, 200)]
        cases += [("deflate", body, 415), ("br", body, 415), ("x", body, 415), ("identity", body, 200)]
        for encoding, sent, status in cases:
            headers = {"x-api-key": door.key, "Content-Encoding": encoding}
            async with door.http.post(f"{door.url}/v1/messages", data=sent, headers=headers) as response:
                assert response.status == status, (encoding, await response.text())
                assert response.content_type == "application/json"
        assert len(door.session.tree.calls()) == 2


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip"])
async def test_nothing_follows_the_head_of_an_answer_to_head(tmp_path, encoding):
    """Whatever its body claims to be: what followed would be taken for the next answer."""
    async with opened(tmp_path) as door:
        where = urlsplit(door.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"HEAD {where.path}/v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n"
        writer.write(f"{head}Authorization: Bearer {door.key}\r\nContent-Encoding: {encoding}\r\n\r\n{{}}".encode())
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"\r\n\r\n"), answer


async def test_a_small_body_may_unpack_to_too_much(tmp_path):
    async with opened(tmp_path) as door:
        bomb, headers = gzip.compress(b" " * (65 << 20), 9), {"x-api-key": door.key, "Content-Encoding": "gzip"}
        assert len(bomb) < 100_000
        async with door.http.post(f"{door.url}/v1/messages", data=bomb, headers=headers) as response:
            assert response.status == 413 and (await response.json())["error"]["type"] == "request_too_large"


async def test_a_body_may_be_too_large(tmp_path):
    async with opened(tmp_path) as door:
        door.engine()
        body = b'{"messages":[{"role":"user","content":"' + b"x" * (65 << 20) + b'"}]}'
        async with door.http.post(f"{door.url}/v1/messages", data=body, headers={"x-api-key": door.key}) as response:
            assert response.status == 413 and (await response.json())["error"]["type"] == "request_too_large"
