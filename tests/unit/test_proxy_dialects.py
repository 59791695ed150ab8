"""The dialects against golden files: what a request means, what an answer looks like, whole and streamed, byte by byte.

Ids and times come in with the ``Head`` and the turn, so answers are the same every time. All that is written is also
read by the vendors' own types. ``pytest --update-golden`` rewrites the answers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest
from msgspec import structs
from pydantic import TypeAdapter

from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall, ToolResult
from opengyre.proxy.dialects.base import Head
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.dialects.responses import Responses
from opengyre.proxy.keys import keys
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply, Turn
from opengyre.record.types import Finish

GOLDEN = Path(__file__).parent.parent / "golden"
DIALECTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}
CALLS = (ToolCall("toolu_1", "read", {"path": "ä.py", "line": 3}), ToolCall("toolu_2", "run", {}))
REPLIES = {
    "text": Reply("c0ffee", Turn((Text("Hello."),), True), Finish.STOP, 123, 3, True),
    "thinking": Reply("c0ffee", Turn((Thinking("I think."), Text("So.")), True), Finish.STOP, 123, 9, True),
    "empty": Reply("c0ffee", Turn((), True), Finish.STOP, 123, 1, True),
    "calls": Reply("c0ffee", Turn((Thinking("I look."), Text("Reading:"), *CALLS), True), Finish.STOP, 123, 40, True),
    "cut": Reply("c0ffee", Turn((Text('<tool_call>{"name":'),), False, 1), Finish.LENGTH, 123, 8, True),
    "stop_sequence": Reply(
        "c0ffee", Turn((Text("a b "),), True, stop_sequence="STOPHERE"), Finish.STOP_SEQUENCE, 123, 9, True
    ),
}
each_dialect = pytest.mark.parametrize("name", DIALECTS)


TYPES = {
    "messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "chat": (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    "responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
}
REFUSAL = Refusal("prompt is too long: 9 tokens > 8 maximum", code="context_length_exceeded")


def pretty(value) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def request(name: str, case: str):
    return DIALECTS[name].parse(json.loads((GOLDEN / name / f"{case}.request.json").read_text()))


def head(name: str) -> Head:
    return Head("c0ffee", request(name, "agent"), 123, created_s=1_700_000_000)


def written(name: str, reply: Reply) -> tuple[dict, bytes]:
    """(whole, streamed)"""
    emitter = DIALECTS[name].emitter(head(name))
    return DIALECTS[name].body(head(name), reply), emitter.open() + emitter.ping() + emitter.close(reply)


def data(stream: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: {")]


@each_dialect
@pytest.mark.parametrize("case", REPLIES)
def test_answers(name, case, golden):
    whole, stream = written(name, REPLIES[case])
    golden(GOLDEN / name / f"{case}.response.json", pretty(whole))
    golden(GOLDEN / name / f"{case}.stream.txt", stream.decode())


@cache
def adapters(name: str) -> list[TypeAdapter]:
    return [TypeAdapter(kind) for kind in TYPES[name]]


@each_dialect
@pytest.mark.parametrize("case", REPLIES)
def test_answers_are_what_the_vendors_types_say(name, case):
    whole, stream = written(name, REPLIES[case])
    kind, event = adapters(name)
    kind.validate_python(whole)
    for each in data(stream):
        if each.get("type") != "ping":
            event.validate_python(each)


@each_dialect
def test_an_error_after_the_start(name, golden):
    emitter = DIALECTS[name].emitter(head(name))
    overloaded = Refusal("the model is not available right now", status=529, kind="overloaded_error")
    frames = emitter.open() + emitter.delta("text", "Hel") + emitter.fail(overloaded)
    golden(GOLDEN / name / "failed.stream.txt", frames.decode())


@each_dialect
def test_deltas_released_early_do_not_change_the_answer(name):
    dialect, reply = DIALECTS[name], REPLIES["calls"]
    emitter = dialect.emitter(head(name))
    stream = emitter.open() + emitter.delta("thinking", "I lo") + emitter.delta("text", "Rea") + emitter.close(reply)
    said = {"thinking": "", "text": ""}
    for event in data(stream):
        delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta") or {}
        if isinstance(delta, str):  # Responses
            said["thinking" if "reasoning" in event["type"] else "text"] += delta if "_text" in event["type"] else ""
            continue
        said["thinking"] += delta.get("thinking", "") + delta.get("reasoning_content", "")
        said["text"] += delta.get("text", "") + delta.get("content", "")
    assert said == {"thinking": "I look.", "text": "Reading:"}


@each_dialect
def test_errors_have_the_dialects_form(name, golden):
    golden(GOLDEN / name / "error.json", pretty(DIALECTS[name].error(REFUSAL)))


def test_what_a_request_means_is_the_same_in_all_dialects(golden):
    read = [request(name, "agent") for name in DIALECTS]
    golden(GOLDEN / "agent.conversation.json", pretty(_meaning(read[0])))
    assert [_meaning(c) for c in read[1:]] == [_meaning(read[0])] * 2
    assert len({tuple(keys(c)) for c in read}) == 1


def _meaning(conversation):
    parts = [
        {"role": m.role, "parts": [{"kind": type(p).__name__, **structs.asdict(p)} for p in m.parts]}
        for m in conversation.messages
    ]
    for part in (p for m in parts for p in m["parts"]):
        part.pop("signature", None)  # Chat Completions has none
    return {
        "messages": parts,
        "tools": [asdict(t) for t in conversation.tools],
        "max_tokens": conversation.max_tokens,
    }


def test_billing_lines_are_removed_and_user_text_is_not():  # P03
    def parse(system, text="hi"):
        return Messages().parse({"system": system, "messages": [{"role": "user", "content": text}], "max_tokens": 8})

    line = "x-anthropic-billing-header: cc_version=9.9; cc_entrypoint=cli; cch={};"
    a, b = (parse([{"type": "text", "text": line.format(c)}, {"type": "text", "text": "You."}]) for c in "ab")
    assert a.messages == b.messages == (Message("system", (Text("You."),)), Message("user", (Text("hi"),)))
    assert parse([{"type": "text", "text": line}]).messages == (Message("user", (Text("hi"),)),)
    text = "x-anthropic-billing-header: what is that?"
    assert parse([], text).messages[-1].text == text


def test_images_become_a_visible_placeholder():  # P11
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "…"}}
    content = [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}, image]}]
    conversation = Messages().parse({"messages": [{"role": "user", "content": content}]})
    (result,) = conversation.messages[0].parts
    assert isinstance(result, ToolResult) and result.text.startswith("ok\n[image image/png: not shown")
    assert conversation.extra["placeholders"] == 1
    url = "data:image/png;base64,AA=="
    chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    message = {"role": "user", "content": [image]}
    read = [
        Messages().parse({"messages": [message]}),
        Chat().parse({"messages": [chat]}),
        Responses().parse({"input": [item]}),
    ]
    assert read[0].messages == read[1].messages == read[2].messages
    assert [c.extra["placeholders"] for c in read] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "body", "names"),
    [
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ("messages", {"messages": "x"}, "messages"),
        ("messages", {"messages": [], "max_tokens": "many"}, "max_tokens"),
        ("messages", {"messages": [], "max_tokens": 0}, "max_tokens"),
        ("messages", {"messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0"),
        ("messages", {"messages": [], "stop_sequences": [1]}, "stop_sequences.0"),
        ("responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]"),
        ("responses", {"input": [{"role": "robot"}]}, r"input\[0\].role"),
        ("responses", {"input": 3}, "input"),
        ("chat", {"messages": [{"role": "robot"}]}, r"messages\[0\].role"),
        ("chat", {"messages": [], "n": 2}, "n:"),
        ("chat", {"messages": [], "functions": [{}]}, "functions"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": {}}]}, "tool_calls"),
        ("chat", {"messages": [], "stream": "yes"}, "stream"),
        ("chat", {"messages": [], "tools": [{"function": {"name": 1}}]}, "name"),
    ],
)
def test_refusals_name_the_field(name, body, names):
    with pytest.raises(Refusal, match=names) as refused:
        DIALECTS[name].parse(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 9}, {"type": "adaptive"}, None])
def test_thinking_modes(thinking):  # P10
    body = {"messages": [], "thinking": thinking}
    assert Messages().parse(body).thinking is (None if thinking is None else True)
    assert Messages().parse({**body, "thinking": {"type": "disabled"}}).thinking is False
    assert Chat().parse({"messages": [], "reasoning_effort": "none"}).thinking is False
    assert Chat().parse({"messages": [], "chat_template_kwargs": {"enable_thinking": True}}).thinking is True


def test_arguments_that_are_no_json_are_kept():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    conversation = Chat().parse({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert conversation.messages[0].parts == (ToolCall("c", "f", "{oops"),)


def test_namespaced_and_custom_tools_find_their_way_back():
    members = [{"type": "function", "name": "spawn", "parameters": {}}, {"type": "custom", "name": "tell"}]
    patch = {"type": "custom", "name": "patch", "description": "d"}
    body = {
        "model": "policy-model",
        "input": [
            {"role": "user", "content": "go"},
            {"type": "function_call", "call_id": "a", "namespace": "agents", "name": "spawn", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** x"},
            {"type": "function_call_output", "call_id": "a", "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        ],
        "tools": [{"type": "namespace", "name": "agents", "tools": members}, patch, {"type": "web_search"}],
    }
    asked = Responses().parse(body)
    calls = (ToolCall("a", "agents.spawn", {}), ToolCall("b", "patch", {"input": "*** x"}))
    assert asked.messages[1].parts == calls
    assert [t.name for t in asked.tools] == ["agents.spawn", "agents.tell", "patch"]
    calls = (*calls, ToolCall("c", "agents.tell", {"input": "hi"}), ToolCall("d", "patch", {"other": 1}))
    reply = replace(REPLIES["calls"], turn=Turn(calls, True))
    spawn, custom, tell, wrong = Responses().body(Head("c", asked, 1), reply)["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** x")
    assert (tell["type"], tell["namespace"], tell["name"], tell["input"]) == (
        "custom_tool_call",
        "agents",
        "tell",
        "hi",
    )
    assert (wrong["type"], wrong["arguments"]) == ("function_call", '{"other":1}')


def test_custom_tools_of_chat_completions_find_their_way_back():
    said = {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "d", "format": {"type": "text"}}}
    asked = Chat().parse({"messages": [{"role": "assistant", "tool_calls": [said]}], "tools": [tool]})
    call = ToolCall("b", "patch", {"input": "*** x"})
    assert asked.messages[0].parts == (call,) and asked.tools[0].parameters["required"] == ["input"]
    reply = replace(REPLIES["calls"], turn=Turn((call,), True))
    assert Chat().body(Head("c", asked, 1), reply)["choices"][0]["message"]["tool_calls"] == [said]
