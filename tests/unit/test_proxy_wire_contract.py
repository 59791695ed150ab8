"""The support contracts: every rule is driven with its example, and every field of the vendors' SDKs has a rule."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.chat_contract import CONTRACT as CHAT
from opengyre.proxy.dialects.contract import Contract, Part, Rule, Treatment, names, table
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.dialects.messages_contract import CONTRACT as MESSAGES
from opengyre.proxy.dialects.responses import Responses
from opengyre.proxy.dialects.responses_contract import CONTRACT as RESPONSES
from opengyre.proxy.refusals import Refusal

WIRE = Path(__file__).parents[2] / "docs" / "wire.md"
CONTRACTS: dict[str, Contract] = {"messages": MESSAGES, "chat": CHAT, "responses": RESPONSES}
DIALECTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}
RULES = [(name, rule) for name, contract in CONTRACTS.items() for rule in contract]
USER = {"role": "user", "content": "go"}
BASE: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 100, "messages": [USER]},
    "chat": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": [USER]},
}


def rules(*parts: Part, treatments: tuple[Treatment, ...] = tuple(Treatment)):
    chosen = [(name, rule) for name, rule in RULES if rule.part in parts and rule.treatment in treatments]
    return pytest.mark.parametrize(("name", "rule"), chosen, ids=[f"{n}-{r.part.name}-{r.name}" for n, r in chosen])


def with_field(name: str, field: str, value: Any) -> dict[str, Any]:
    for step in reversed(field.split(".")):
        value = {step: value}
    return {**BASE[name], **value}


def with_message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    history = "input" if name == "responses" else "messages"
    return {**BASE[name], history: [USER, message]}


def said(conversation) -> str:
    return repr(conversation.messages[1:])


@rules(Part.FIELD)
def test_fields(name: str, rule: Rule):
    plain = DIALECTS[name].parse(BASE[name])
    body = with_field(name, rule.name, rule.example)
    match rule.treatment:
        case Treatment.HONOURED:
            assert DIALECTS[name].parse(body) != plain
        case Treatment.IGNORED if rule.name in ("temperature", "top_p", "top_k"):
            read = DIALECTS[name].parse(body)  # read, so that a wrong type is told; the pins win
            assert (read.messages, read.tools) == (plain.messages, plain.tools)
        case Treatment.IGNORED:
            assert DIALECTS[name].parse(body) == plain
        case Treatment.REFUSED:
            with pytest.raises(Refusal, match=f"^{rule.name}: ") as refused:
                DIALECTS[name].parse(body)
            assert (refused.value.status, refused.value.param) == (400, rule.name)
            for asks_nothing in (*rule.unless, None, False, [], {}, ""):
                DIALECTS[name].parse(with_field(name, rule.name, asks_nothing))


@rules(Part.ROLE)
def test_roles(name: str, rule: Rule):
    body = with_message(name, {"role": rule.name, "content": rule.example, "tool_call_id": "t1", "name": "f"})
    if rule.treatment is Treatment.REFUSED:
        with pytest.raises(Refusal, match="role"):
            DIALECTS[name].parse(body)
        return
    conversation = DIALECTS[name].parse(body)
    assert rule.example in said(conversation)
    expected = {"developer": "system"}.get(rule.name, rule.name)
    assert conversation.messages[1].role == expected


@rules(Part.CONTENT)
def test_content_blocks(name: str, rule: Rule):
    kind = rule.example["type"]
    role = "assistant" if kind in ("thinking", "redacted_thinking", "tool_use", "output_text", "refusal") else "user"
    conversation = DIALECTS[name].parse(with_message(name, {"role": role, "content": [rule.example]}))
    shown = rule.treatment is Treatment.SHOWN
    assert conversation.extra["placeholders"] == shown
    assert (": not shown, this model reads text only]" in said(conversation)) == shown
    if not shown:
        words = [v for k, v in rule.example.items() if k not in ("type", "is_error", "input") and isinstance(v, str)]
        assert words and all(word in said(conversation) for word in words)


@rules(Part.ITEM)
def test_input_items(name: str, rule: Rule):
    body = with_message(name, rule.example)
    if rule.treatment is Treatment.REFUSED:
        with pytest.raises(Refusal, match=r"input\[1\]"):
            DIALECTS[name].parse(body)
        return
    conversation = DIALECTS[name].parse(body)
    shown = rule.treatment is Treatment.SHOWN
    assert conversation.extra["placeholders"] == shown
    assert (f"[{rule.name}" if shown else "hello") in said(conversation)


@rules(Part.TOOL)
def test_tools(name: str, rule: Rule):
    conversation = DIALECTS[name].parse({**BASE[name], "tools": [rule.example]})
    shown = [t.name for t in conversation.tools]
    expected = {"namespace": ["agents.spawn"]}.get(rule.name, ["f"])
    assert shown == (expected if rule.treatment is Treatment.HONOURED else [])


def test_every_field_of_the_sdks_has_a_rule():
    def fields(*params: type) -> set[str]:
        return {field for each in params for field in typing.get_type_hints(each)}

    messages = fields(
        message_create_params.MessageCreateParamsStreaming, beta_message_create_params.MessageCreateParamsStreaming
    )
    chat = fields(completion_create_params.CompletionCreateParamsStreaming)
    responses = fields(response_create_params.ResponseCreateParamsStreaming)
    for name, known in (("messages", messages), ("chat", chat), ("responses", responses)):
        ruled = {field.split(".")[0] for field in names(CONTRACTS[name], Part.FIELD)}
        assert known - ruled == set(), name


def test_no_rule_is_there_twice():
    for contract in CONTRACTS.values():
        named = [(rule.part, rule.name) for rule in contract]
        assert len(named) == len(set(named))


def test_the_page_says_what_the_contracts_say(golden):
    text = WIRE.read_text()
    for name, contract in CONTRACTS.items():
        begin, end = f"<!-- contract: {name} -->\n", f"<!-- end of contract: {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        assert rest and after, f"{WIRE} has no place for the contract of {name}"
        text = f"{before}{begin}\n{table(contract)}\n{end}{after}"
    golden(WIRE, text)
