"""Real clients at the door: Anthropic's SDK and OpenAI-style HTTP, streamed and not."""

from __future__ import annotations

import json

import pytest
from anthropic import AsyncAnthropic, BadRequestError

from door import events, opened
from opengyre.record.types import Finish
from policies import HISTORY_REWRITING

CALLS = [("a", {"x": 1}), ("b", {"y": 2}), ("c", {})]
THREE_CALLS = "\n".join(
    f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, separators=(',', ':'))}\n</tool_call>" for n, a in CALLS
)
TOOLS = [{"name": n, "description": n, "input_schema": {"type": "object"}} for n in "abc"]
ASK = {"model": "policy-model", "max_tokens": 256, "messages": [{"role": "user", "content": "go"}]}
by_streaming = pytest.mark.parametrize("stream_tokens", [False, True], ids=["whole", "by_token"])


def client(door) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=door.url, auth_token=door.key, api_key=None, max_retries=0)


async def streamed(sdk: AsyncAnthropic, **ask):
    """(final message as the SDK's state machine builds it, raw events)."""
    raw = []
    async with sdk.messages.stream(**ask) as stream:
        async for event in stream:
            raw.append(event)
        return await stream.get_final_message(), raw


def recorded(door, call: int = -1):
    record = door.session.tree.calls()[call]
    return door.session.tree.rebuild(record.reply_node), record


@by_streaming
async def test_parallel_calls_stream_as_separate_blocks(tmp_path, stream_tokens):  # P05
    async with opened(tmp_path, stream_tokens=stream_tokens) as door, client(door) as sdk:
        engine = door.engine()
        door.script.replies = [f"Three.\n{THREE_CALLS}"] * 2
        message, raw = await streamed(sdk, tools=TOOLS, **ASK)
        assert [(b.name, b.input) for b in message.content[1:]] == CALLS
        assert message.content[0].text == "Three." and message.stop_reason == "tool_use"
        assert message.model == "policy-model" and len({b.id for b in message.content[1:]}) == 3
        starts = [e.index for e in raw if e.type == "content_block_start"]
        assert starts == [0, 1, 2, 3]
        path, _ = recorded(door)
        assert door.renderer.decode(path.ids[path.sampled].tolist()) == f"Three.\n{THREE_CALLS}"
        whole = await sdk.messages.create(tools=TOOLS, **ASK)
        assert [b.model_dump(exclude={"id"}) for b in whole.content] == [
            b.model_dump(exclude={"id", "parsed_output"}) for b in message.content
        ]
        assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


@by_streaming
async def test_thinking_comes_signed_and_is_found_again(tmp_path, stream_tokens):  # P10
    async with opened(tmp_path, template=HISTORY_REWRITING, stream_tokens=stream_tokens) as door, client(door) as sdk:
        engine = door.engine()
        call = '<tool_call>\n{"name": "a", "arguments": {"x": 1.0}}\n</tool_call>'
        door.script.replies = [f"why\nnot\n</think>\n\nI do.\n{call}"]
        door.script.default = "</think>\n\nok"
        ask = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
        message, _ = await streamed(sdk, tools=TOOLS, **ask)
        thinking, _, use = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "why\nnot") and thinking.signature
        block = {"type": "thinking", "thinking": thinking.thinking, "signature": thinking.signature}
        told = [{"type": "text", "text": "I do."}, {"type": "tool_use", "id": use.id, "name": "a", "input": {"x": 1}}]
        result = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"}]
        before = recorded(door, 0)[0].ids.tolist()
        for said in ([block, *told], [{**block, "thinking": ""}, *told], told):
            messages = [*ASK["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": result}]
            await sdk.messages.create(tools=TOOLS, **{**ask, "messages": messages})
            assert engine.requests[-1].prompt_ids[: len(before)] == before
        assert len({tuple(r.prompt_ids) for r in engine.requests[1:]}) == 1


async def test_usage_is_true_from_the_first_event(tmp_path):  # P06, P07
    async with opened(tmp_path) as door, client(door) as sdk:
        engine = door.engine()
        message, raw = await streamed(sdk, **ASK)
        start = next(e for e in raw if e.type == "message_start").message.usage
        assert start.input_tokens + start.cache_read_input_tokens == len(engine.requests[0].prompt_ids)
        assert message.usage.input_tokens == start.input_tokens and message.usage.output_tokens == 3
        use = {"type": "tool_use", "id": "t1", "name": "a", "input": {"p": "a"}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "text " * 400}
        ask = {
            "model": "m",
            "system": "S",
            "tools": TOOLS,
            "messages": [
                *ASK["messages"],
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
        }
        nodes = len(door.session.tree)
        counted = await sdk.messages.count_tokens(**ask)
        assert len(door.session.tree) == nodes and door.sessions.calls("e") == 1
        answer = await sdk.messages.create(max_tokens=8, **ask)
        assert counted.input_tokens == answer.usage.input_tokens == len(engine.requests[1].prompt_ids)
        async with door.request("/v1/messages/count_tokens?beta=true", {"messages": "broken"}) as response:
            assert response.status == 400
        assert (await sdk.messages.create(**ASK)).stop_reason == "end_turn"


@by_streaming
async def test_stop_sequences_are_enforced_and_named(tmp_path, stream_tokens):  # P09
    async with opened(tmp_path, stream_tokens=stream_tokens) as door, client(door) as sdk:
        engine = door.engine()
        door.script.replies = ["a b STOPHERE c d e f", "a b"]
        message, _ = await streamed(sdk, stop_sequences=["STOPHERE"], **ASK)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOPHERE")
        assert message.content[0].text == "a b "
        path, record = recorded(door)
        assert door.renderer.decode(path.ids[path.sampled].tolist()) == "a b STOPHERE"
        assert record.meta.finish is Finish.STOP_SEQUENCE and not engine.running and engine.aborted
        message, _ = await streamed(sdk, stop_sequences=["STOPHERE"], **ASK)
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


async def test_a_truncated_call_is_truncation(tmp_path):  # P27
    async with opened(tmp_path) as door, client(door) as sdk:
        engine = door.engine()
        cut = '<tool_call>{"name":"bash","arguments":{"cmd":"ls'
        door.script.replies = [cut + ' -l"}}</tool_call>', "rest"]
        n = len(door.renderer.encode(cut))
        message, _ = await streamed(sdk, **{**ASK, "max_tokens": n})
        assert message.stop_reason == "max_tokens" and [b.type for b in message.content] == ["text"]
        path, _ = recorded(door)
        assert path.sampled.sum() == n and door.session.counters.truncated == 1
        assert door.session.counters.malformed_calls == 1
        said = {"role": "assistant", "content": message.content[0].text}
        await sdk.messages.create(
            **{**ASK, "messages": [*ASK["messages"], said, {"role": "user", "content": "Output token limit hit."}]}
        )
        before = path.ids.tolist()
        assert engine.requests[1].prompt_ids[: len(before)] == before
        assert engine.requests[1].prompt_ids[len(before)] in door.renderer.stop_token_ids


async def test_context_overflow_is_the_sdks_bad_request(tmp_path):
    async with opened(tmp_path, context=64) as door, client(door) as sdk:
        with pytest.raises(BadRequestError, match="exceed context limit"):
            await sdk.messages.create(**ASK)


async def test_ids_rewritten_by_the_client_do_not_fork(tmp_path):  # P28, P03
    async with opened(tmp_path) as door:
        engine = door.engine()
        door.script.replies = [THREE_CALLS, "ok"]
        line = "x-anthropic-billing-header: cc_version=9.9; cc_entrypoint=cli; cch={};"

        def ask(nonce: str, *more):
            system = [{"type": "text", "text": line.format(nonce)}, {"type": "text", "text": "You are an agent."}]
            return {**ASK, "system": system, "messages": [*ASK["messages"], *more]}

        _, answer = await door.post("/v1/messages", ask("a"))
        minted = [b["id"] for b in answer["content"]]
        assert len(set(minted)) == 3
        uses = [{**b, "id": "functions.f:0"} for b in answer["content"]]
        results = [{"type": "tool_result", "tool_use_id": "functions.f:0", "content": str(i)} for i in range(3)]
        more = ({"role": "assistant", "content": uses}, {"role": "user", "content": results})
        status, _ = await door.post("/v1/messages", ask("b", *more))
        before = recorded(door, 0)[0].ids.tolist()
        assert status == 200 and engine.requests[1].prompt_ids[: len(before)] == before
        assert len(door.session.tree.leaves()) == 1


async def test_all_dialects_record_the_same_tokens(tmp_path):
    """The same conversation through three doors, three turns with thinking and tools: the same tree, node by node."""
    trees = []
    talks = {"messages": _messages_talk, "chat": _chat_talk, "responses": _responses_talk}
    for dialect, talk in talks.items():
        (tmp_path / dialect).mkdir()
        async with opened(tmp_path / dialect) as door:
            door.engine()
            door.script.replies = [f"<think>\nwhy\n</think>\n\nTwo.\n{THREE_CALLS}", "plain\nwords", "end"]
            await talk(door)
            tree = door.session.tree
            assert len(tree.leaves()) == 1 and len(tree.calls()) == 3
            trees.append([tree.node(i).ids.tolist() for i in range(1, len(tree))])
    assert trees[0] == trees[1] == trees[2]


async def _messages_talk(door) -> None:
    messages: list[dict] = [{"role": "user", "content": "go"}]
    for text in ("more", "last", None):
        _, answer = await door.post("/v1/messages", {**ASK, "system": "S", "tools": TOOLS, "messages": messages})
        messages.append({"role": "assistant", "content": answer["content"]})
        uses = [b["id"] for b in answer["content"] if b["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": u, "content": f"r{i}"} for i, u in enumerate(uses)]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": text}]})


async def _chat_talk(door) -> None:
    tools = [
        {"type": "function", "function": {"name": n, "description": n, "parameters": {"type": "object"}}} for n in "abc"
    ]
    messages: list[dict] = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]
    for text in ("more", "last", None):
        body = {"model": "policy-model", "max_tokens": 256, "tools": tools, "messages": messages}
        _, answer = await door.post("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        messages.append(message)
        for i, call in enumerate(message.get("tool_calls", [])):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"r{i}"})
        messages.append({"role": "user", "content": text})


async def _responses_talk(door) -> None:
    tools = [{"type": "function", "name": n, "description": n, "parameters": {"type": "object"}} for n in "abc"]
    items: list[dict] = [{"role": "user", "content": "go"}]
    for text in ("more", "last", None):
        body = {"model": "policy-model", "max_output_tokens": 256, "instructions": "S", "tools": tools, "input": items}
        _, answer = await door.post("/v1/responses", body)
        items += answer["output"]
        for i, call in enumerate(o for o in answer["output"] if o["type"] == "function_call"):
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": f"r{i}"})
        items.append({"role": "user", "content": text})


@by_streaming
async def test_responses_streamed_and_whole_agree(tmp_path, stream_tokens):
    async with opened(tmp_path, stream_tokens=stream_tokens) as door:
        door.engine()
        door.script.replies = [f"<think>\nwhy\n</think>\n\nThree.\n{THREE_CALLS}"] * 2 + ["a long reply"]
        body = {"model": "policy-model", "input": "go"}
        _, whole = await door.post("/v1/responses", body)
        got = await door.stream("/responses", body)
        assert [e["sequence_number"] for e in got] == list(range(len(got)))
        items = [e["item"] for e in got if e["type"] == "response.output_item.done"]
        assert got[-1]["type"] == "response.completed" and got[-1]["response"]["output"] == items
        ids = ("id", "call_id", "encrypted_content")
        plain = [[{k: v for k, v in o.items() if k not in ids} for o in out] for out in (items, whole["output"])]
        assert plain[0] == plain[1] and [o["type"] for o in items] == ["reasoning", "message"] + ["function_call"] * 3
        assert got[-1]["response"]["usage"] == whole["usage"]
        _, cut = await door.post("/v1/responses", {**body, "max_output_tokens": 3})
        assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}


@by_streaming
async def test_chat_completions_streamed_and_whole_agree(tmp_path, stream_tokens):
    async with opened(tmp_path, stream_tokens=stream_tokens) as door:
        door.engine()
        door.script.replies = [f"<think>\nwhy\n</think>\n\nThree.\n{THREE_CALLS}"] * 2
        body = {"model": "policy-model", "messages": ASK["messages"]}
        _, whole = await door.post("/v1/chat/completions", body)
        expected = whole["choices"][0]
        assert expected["finish_reason"] == "tool_calls" and expected["message"]["reasoning_content"] == "why"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with door.request("/chat/completions", {**body, **options}) as response:
            raw = await response.read()
        assert raw.endswith(b"data: [DONE]\n\n")
        chunks = events(raw)
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert "".join(d.get("content", "") for d in deltas) == "Three."
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "why"
        calls = [c for d in deltas for c in d.get("tool_calls", [])]
        assert [(c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
            (i, n, a) for i, (n, a) in enumerate(CALLS)
        ]
        assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_the_odd_endpoints(tmp_path):
    async with opened(tmp_path) as door:
        async with door.http.head(f"{door.url}/api/hello") as response:
            assert response.status == 200
        async with door.http.get(f"{door.sessions.base_url}/healthz") as response:
            assert await response.json() == {"ok": True, "engines": {}, "waiting": 0}
        async with door.request("/v1/nothing", {}) as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "not_found_error"
        async with door.http.post(f"{door.url}/v1/messages", data=b"{", headers={"x-api-key": door.key}) as response:
            assert response.status == 400
        door.engine()
        lone = b'{"max_tokens": 9, "messages": [{"role": "user", "content": "a\\ud800b"}]}'
        async with door.http.post(f"{door.url}/v1/messages", data=lone, headers={"x-api-key": door.key}) as response:
            assert response.status == 200
