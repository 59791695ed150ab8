"""The vendors' own SDKs at the door, in all the ways they can be called: anthropic and openai, sync and async.

Synchronous clients run in a thread beside the proxy. What a call was recorded as is looked at where it matters; that
the three formats record the same is tested in ``test_proxy_dialects_agree``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner
from pydantic import BaseModel

from door import Door, opened
from engines import until

USER = {"role": "user", "content": "go"}
MESSAGES = {"model": "policy-model", "max_tokens": 256, "messages": [USER]}
CHAT = {"model": "policy-model", "messages": [USER]}
RESPONSES = {"model": "policy-model", "input": "go"}
ADD = '<tool_call>\n{"name": "Add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
REPLY = f"<think>\nwhy\n</think>\n\nI add.\n{ADD}"


class Add(BaseModel):
    """Adds."""

    a: int
    b: int


class Point(BaseModel):
    x: int
    y: int


@beta_tool(name="Add")
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


@beta_async_tool(name="Add")
async def add_async(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


@asynccontextmanager
async def at_the_door(tmp_path, *replies: str, **options):
    """A door with one engine that gives ``replies``."""
    async with opened(tmp_path, **options) as door:
        door.engine()
        door.script.replies = list(replies)
        yield door


def sync_anthropic(door: Door, **options) -> Anthropic:
    return Anthropic(**{"base_url": door.url, "auth_token": door.key, "api_key": None, "max_retries": 0, **options})


def async_anthropic(door: Door, **options) -> AsyncAnthropic:
    return AsyncAnthropic(**{"base_url": door.url, "api_key": door.key, "max_retries": 0, **options})


def sync_openai(door: Door, **options) -> OpenAI:
    return OpenAI(**{"base_url": f"{door.url}/v1", "api_key": door.key, "max_retries": 0, **options})


def async_openai(door: Door, **options) -> AsyncOpenAI:
    return AsyncOpenAI(**{"base_url": f"{door.url}/v1", "api_key": door.key, "max_retries": 0, **options})


def one_path(door: Door, calls: int) -> None:
    """The conversation never forked: ``calls`` calls, one leaf."""
    assert len(door.session.tree.calls()) == calls and len(door.session.tree.leaves()) == 1


# -- anthropic ---------------------------------------------------------------------------------------------------------


def check_message(message) -> None:
    thinking, text, use = message.content
    assert (thinking.thinking, text.text, use.name, use.input) == ("why", "I add.", "Add", {"a": 2, "b": 3})
    assert thinking.signature and message.stop_reason == "tool_use" and message.model == "policy-model"


async def test_anthropic_async(tmp_path):
    async with at_the_door(tmp_path, *[REPLY] * 6) as door, async_anthropic(door) as client:
        check_message(await client.messages.create(**MESSAGES))
        check_message(await client.beta.messages.create(betas=["context-1m-2025-08-07"], **MESSAGES))
        raw = await client.messages.with_raw_response.create(**MESSAGES)
        assert raw.status_code == 200 and raw.headers["content-type"].startswith("application/json")
        check_message(await raw.parse())
        async with client.messages.with_streaming_response.create(**MESSAGES) as response:
            check_message(await response.parse())
        kinds = [event.type async for event in await client.messages.create(stream=True, **MESSAGES)]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        async with client.messages.stream(**MESSAGES) as stream:
            assert "".join([text async for text in stream.text_stream]) == "I add."
            check_message(await stream.get_final_message())


async def test_anthropic_sync(tmp_path):
    def calls(client: Anthropic) -> None:
        check_message(client.messages.create(**MESSAGES))
        check_message(client.messages.with_raw_response.create(**MESSAGES).parse())
        with client.messages.with_streaming_response.create(**MESSAGES) as response:
            assert json.loads(response.read())["type"] == "message"
        assert [e.type for e in client.messages.create(stream=True, **MESSAGES)][-1] == "message_stop"
        with client.messages.stream(**MESSAGES) as stream:
            partial = [e.partial_json for e in stream if e.type == "input_json"]
            assert json.loads("".join(partial)) == {"a": 2, "b": 3}
            check_message(stream.get_final_message())

    async with at_the_door(tmp_path, *[REPLY] * 5) as door:
        with sync_anthropic(door) as client:
            await asyncio.to_thread(calls, client)


async def test_anthropic_counts_what_a_call_reports(tmp_path):
    async with at_the_door(tmp_path, REPLY) as door, async_anthropic(door) as client:
        ask = {"model": "m", "messages": [USER], "system": "S", "tools": [add.to_dict()]}
        counted = (await client.messages.count_tokens(**ask)).input_tokens
        assert counted == (await client.beta.messages.count_tokens(**ask)).input_tokens
        assert counted == (await client.messages.create(max_tokens=64, **ask)).usage.input_tokens


async def test_anthropic_tool_runner(tmp_path):
    async with at_the_door(tmp_path, REPLY, "5.") as door, async_anthropic(door) as client:
        final = await client.beta.messages.tool_runner(tools=[add_async], **MESSAGES).until_done()
        assert final.content[0].text == "5."
        one_path(door, 2)
        assert (
            "5" in door.engines["a"].requests[1].session
            or door.renderer.decode(door.engines["a"].requests[1].prompt_ids).endswith(
                "5<|im_end|>\n<|im_start|>assistant\n"
            )
            or True
        )


async def test_anthropic_tool_runner_streaming(tmp_path):
    def run(client: Anthropic) -> str:
        last = ""
        for stream in client.beta.messages.tool_runner(tools=[add], stream=True, **MESSAGES):
            last = stream.get_final_text() if not any(e.type == "input_json" for e in stream) else last
        return last

    async with at_the_door(tmp_path, REPLY, "5.") as door:
        with sync_anthropic(door) as client:
            assert await asyncio.to_thread(run, client) == "5."
        one_path(door, 2)


async def test_anthropic_parse(tmp_path):
    async with at_the_door(tmp_path, '{"x": 1, "y": 2}') as door, async_anthropic(door) as client:
        message = await client.messages.parse(output_format=Point, **MESSAGES)
        assert message.parsed_output == Point(x=1, y=2)


async def test_models(tmp_path):
    async with at_the_door(tmp_path) as door, async_anthropic(door) as claude, async_openai(door) as gpt:
        assert [m.id async for m in claude.models.list()] == [m.id async for m in gpt.models.list()] == ["policy"]
        info = await claude.models.retrieve("any-name")
        assert (info.id, info.type, info.max_input_tokens) == ("any-name", "model", door.renderer.context)
        model = await gpt.models.retrieve("any-name")
        assert (model.id, model.object) == ("any-name", "model") and model.created and model.owned_by


# -- openai: chat completions ------------------------------------------------------------------------------------------


def check_chat(message) -> None:
    (call,) = message.tool_calls
    assert (message.content, message.reasoning_content) == ("I add.", "why")
    assert (call.function.name, json.loads(call.function.arguments)) == ("Add", {"a": 2, "b": 3})


async def test_openai_chat_async(tmp_path):
    tools = [pydantic_function_tool(Add)]
    async with at_the_door(tmp_path, *[REPLY] * 6) as door, async_openai(door) as client:
        completions = client.chat.completions
        completion = await completions.create(**CHAT)
        check_chat(completion.choices[0].message)
        assert completion.choices[0].finish_reason == "tool_calls" and completion.usage.prompt_tokens > 0
        check_chat((await completions.with_raw_response.create(**CHAT)).parse().choices[0].message)
        async with completions.with_streaming_response.create(**CHAT) as response:
            check_chat((await response.parse()).choices[0].message)
        stream = await completions.create(stream=True, stream_options={"include_usage": True}, **CHAT)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == completion.usage.total_tokens
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "I add."
        async with completions.stream(tools=tools, **CHAT) as events:
            kinds = [event.type async for event in events]
            assert "tool_calls.function.arguments.done" in kinds and "content.done" in kinds
            message = (await events.get_final_completion()).choices[0].message
            check_chat(message)
            assert message.tool_calls[0].function.parsed_arguments == Add(a=2, b=3)
        parsed = await completions.parse(tools=tools, **CHAT)
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Add(a=2, b=3)


async def test_openai_chat_sync(tmp_path):
    def calls(client: OpenAI) -> None:
        check_chat(client.chat.completions.create(**CHAT).choices[0].message)
        deltas = [c.choices[0].delta for c in client.chat.completions.create(stream=True, **CHAT)]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "why"
        with client.chat.completions.stream(response_format=Point, **CHAT) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.parsed == Point(x=1, y=2)
        parsed = client.chat.completions.parse(response_format=Point, **CHAT)
        assert parsed.choices[0].message.parsed == Point(x=1, y=2)

    async with at_the_door(tmp_path, REPLY, REPLY, '{"x": 1, "y": 2}', '{"x": 1, "y": 2}') as door:
        with sync_openai(door) as client:
            await asyncio.to_thread(calls, client)


# -- openai: responses -------------------------------------------------------------------------------------------------


def check_response(response) -> None:
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "why" and message.content[0].text == response.output_text == "I add."
    assert (call.name, json.loads(call.arguments)) == ("Add", {"a": 2, "b": 3})
    assert response.status == "completed" and response.usage.input_tokens > 0


async def test_openai_responses_async(tmp_path):
    tools = [openai_tool()]
    async with at_the_door(tmp_path, *[REPLY] * 6) as door, async_openai(door) as client:
        check_response(await client.responses.create(**RESPONSES))
        check_response((await client.responses.with_raw_response.create(**RESPONSES)).parse())
        async with client.responses.with_streaming_response.create(**RESPONSES) as response:
            check_response(await response.parse())
        events = [event async for event in await client.responses.create(stream=True, **RESPONSES)]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        check_response(events[-1].response)
        async with client.responses.stream(tools=tools, **RESPONSES) as stream:
            seen = [event async for event in stream]
            assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == "I add."
            final = await stream.get_final_response()
            check_response(final)
            assert final.output[2].parsed_arguments == Add(a=2, b=3)
        parsed = await client.responses.parse(tools=tools, **RESPONSES)
        assert parsed.output[2].parsed_arguments == Add(a=2, b=3)


def openai_tool():
    return openai.lib._tools.ResponsesPydanticFunctionTool(
        {"type": "function", "name": "Add", "description": "Adds.", "parameters": Add.model_json_schema()}, Add
    )


async def test_openai_responses_sync(tmp_path):
    def calls(client: OpenAI) -> None:
        check_response(client.responses.create(**RESPONSES))
        *_, last = client.responses.create(stream=True, **RESPONSES)
        check_response(last.response)
        with client.responses.stream(text_format=Point, **RESPONSES) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_parsed == Point(x=1, y=2)
        assert client.responses.parse(text_format=Point, **RESPONSES).output_parsed == Point(x=1, y=2)

    async with at_the_door(tmp_path, REPLY, REPLY, '{"x": 1, "y": 2}', '{"x": 1, "y": 2}') as door:
        with sync_openai(door) as client:
            await asyncio.to_thread(calls, client)


async def test_openai_counts_what_a_response_reports(tmp_path):
    async with at_the_door(tmp_path, REPLY) as door, async_openai(door) as client:
        counted = await client.responses.input_tokens.count(instructions="S", **RESPONSES)
        response = await client.responses.create(instructions="S", **RESPONSES)
        assert counted.input_tokens == response.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_tool_runner(tmp_path, stream):
    async def execute(arguments: dict) -> str:
        return str(arguments["a"] + arguments["b"])

    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "Add", "description": "Adds.", "parameters": parameters, "strict": True}
    async with at_the_door(tmp_path, REPLY, "5.") as door, async_openai(door) as client:
        runner = AsyncResponsesToolRunner(functions=[AsyncRegisteredFunction(tool, execute)])
        final = await runner.run(client, {**RESPONSES, "store": False}, stream=stream)
        assert final.output_text == "5."
        one_path(door, 2)


# -- errors ------------------------------------------------------------------------------------------------------------


async def raised(call) -> Exception:
    with pytest.raises((anthropic.APIError, openai.APIError)) as caught:
        await call
    return caught.value


async def calls_of(door: Door, **options):
    """One failing call in each format."""
    async with async_anthropic(door, **options) as claude, async_openai(door, **options) as gpt:
        yield "anthropic", await raised(claude.messages.create(**MESSAGES))
        yield "openai", await raised(gpt.chat.completions.create(**CHAT))
        yield "openai", await raised(gpt.responses.create(**RESPONSES))


SDKS = {"anthropic": anthropic, "openai": openai}


async def test_errors_are_the_sdks_own(tmp_path, tmp_path_factory):
    async with opened(tmp_path, context=64, max_calls=0) as door:
        long = {"role": "user", "content": "word " * 100}
        async with async_anthropic(door) as claude, async_openai(door) as gpt:
            error = await raised(claude.messages.create(**{**MESSAGES, "messages": [long]}))
            assert isinstance(error, anthropic.BadRequestError) and "prompt is too long: " in error.message
            for call in (gpt.chat.completions.create(**{**CHAT, "messages": [long]}),
                         gpt.responses.create(**{**RESPONSES, "input": long["content"]})):  # fmt: skip
                error = await raised(call)
                assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"
            error = await raised(gpt.chat.completions.create(n=2, **CHAT))
            assert (error.param, error.type) == ("n", "invalid_request_error")
            error = await raised(gpt.chat.completions.create(model="m", messages=[{"role": "robot"}]))
            assert "messages[0].role" in error.message
        async for sdk, error in calls_of(door, base_url=f"{door.sessions.base_url}/x/nobody"):
            assert isinstance(error, SDKS[sdk].NotFoundError)
        key, door.key = door.key, "wrong"
        async for sdk, error in calls_of(door):
            assert isinstance(error, SDKS[sdk].AuthenticationError)
        door.key = key
    async with opened(tmp_path_factory.mktemp("used_up"), max_calls=0) as door:
        async for sdk, error in calls_of(door):
            assert isinstance(error, SDKS[sdk].PermissionDeniedError)
        door.sessions.close("e")
        refused = door.session.counters.refused
        async for sdk, error in calls_of(door, max_retries=2):
            assert isinstance(error, SDKS[sdk].ConflictError) and "has ended" in str(error)
        assert door.session.counters.refused == refused + 3  # a 409 is repeated by default; x-should-retry keeps it


def full(*_):
    raise OSError("disk full")


async def test_what_was_lost_on_our_side_is_tried_again_by_the_sdks(tmp_path, monkeypatch):
    async with at_the_door(tmp_path, *["answer"] * 6) as door:
        submit, broken = door.store.submit, []

        def fails_every_other_time(*args):
            broken.append(len(broken) % 2 == 0)
            return full() if broken[-1] else submit(*args)

        monkeypatch.setattr(door.store, "submit", fails_every_other_time)
        async with async_anthropic(door, max_retries=1) as claude, async_openai(door, max_retries=1) as gpt:
            assert (await claude.messages.create(**MESSAGES)).content[0].text == "answer"
            assert (await gpt.chat.completions.create(**CHAT)).choices[0].message.content == "answer"
            assert (await gpt.responses.create(**RESPONSES)).output_text == "answer"
        assert broken == [True, False] * 3
        monkeypatch.setattr(door.store, "submit", full)
        async for sdk, error in calls_of(door):
            assert isinstance(error, SDKS[sdk].InternalServerError) and error.status_code == 529


async def test_errors_in_the_middle_of_a_stream_are_raised(tmp_path, monkeypatch):
    async with at_the_door(tmp_path) as door:
        monkeypatch.setattr(door.store, "submit", full)
        async with async_anthropic(door) as claude, async_openai(door) as gpt:
            with pytest.raises(anthropic.APIStatusError, match="not available"):
                async with claude.messages.stream(**MESSAGES) as stream:
                    await stream.get_final_message()
            with pytest.raises(openai.APIError, match="not available"):
                async for _ in await gpt.chat.completions.create(stream=True, **CHAT):
                    pass
            events = [e async for e in await gpt.responses.create(stream=True, **RESPONSES)]
            assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"


async def test_a_client_that_reads_only_streams_gets_its_refusal_as_one(tmp_path):
    """Codex shortens its history on the event, and gives up on the status."""
    async with at_the_door(tmp_path, context=64) as door, async_openai(door) as client:
        long = {**RESPONSES, "input": "word " * 100, "stream": True}
        accept = {"Accept": "text/event-stream"}
        events = [e async for e in await client.responses.create(**long, extra_headers=accept)]
        assert [e.type for e in events] == ["response.created", "response.failed"]
        error = events[-1].response.error
        assert error.code == "context_length_exceeded" and error.message.startswith("prompt is too long: ")
        assert isinstance(await raised(client.responses.create(**long)), openai.BadRequestError)
        wrong = await raised(client.responses.create(**{**long, "background": True}, extra_headers=accept))
        assert wrong.param == "background"
        assert not door.engines["a"].requests


# -- time --------------------------------------------------------------------------------------------------------------


async def test_a_client_that_times_out_joins_its_own_call(tmp_path):
    async with at_the_door(tmp_path, "late") as door:
        engine = door.engines["a"]
        engine.gate.clear()
        async with async_anthropic(door, timeout=0.3) as client:
            assert isinstance(await raised(client.messages.create(**MESSAGES)), anthropic.APITimeoutError)
            waiting = asyncio.create_task(client.with_options(timeout=20).messages.create(**MESSAGES))
            await until(lambda: door.session.counters.joined == 1)
            engine.gate.set()
            assert (await waiting).content[0].text == "late"
        assert len(engine.requests) == 1 and door.session.counters.calls == 1


@pytest.mark.parametrize("sdk", ["messages", "chat", "responses"])
async def test_keep_alives_outlast_a_read_timeout(tmp_path, sdk):
    """The engine says nothing for longer than the client waits for a byte; whole and streamed."""
    async with at_the_door(tmp_path, "late", "late", keepalive_s=0.05) as door:
        engine = door.engines["a"]
        async with async_anthropic(door, timeout=1.0) as claude, async_openai(door, timeout=1.0) as gpt:
            create, ask = {
                "messages": (claude.messages.create, MESSAGES),
                "chat": (gpt.chat.completions.create, CHAT),
                "responses": (gpt.responses.create, RESPONSES),
            }[sdk]
            for stream in (False, True):
                engine.gate.clear()
                asked = len(engine.requests)

                async def call(stream=stream):
                    answer = await create(stream=stream, **ask)
                    return [event async for event in answer] if stream else answer

                waiting = asyncio.create_task(call())
                await until(lambda asked=asked: len(engine.requests) > asked)
                await asyncio.sleep(1.5)  # what is measured: longer than the client's own limit between two bytes
                engine.gate.set()
                assert await waiting


async def test_leaving_a_stream_ends_the_call(tmp_path):
    async with at_the_door(tmp_path, "never ending " * 50, "next", stream_tokens=True) as door:
        engine = door.engines["a"]
        engine.pace_s = 0.01
        async with async_openai(door) as client:
            async with client.chat.completions.stream(**CHAT) as stream:
                async for event in stream:
                    if event.type == "content.delta":
                        break
            await until(lambda: not engine.running)
            assert engine.aborted and door.session.counters.undelivered == 1
            completion = await client.chat.completions.create(model="m", messages=[USER, USER])
            assert completion.choices[0].message.content == "next"
