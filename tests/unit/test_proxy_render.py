"""Rendering: messages are independent, recorded ids are continued exactly, replies are read strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.errors import ConfigError
from opengyre.proxy.conversation import Conversation, Message, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.render import Renderer
from opengyre.proxy.template import ChatTemplate
from policies import CHATML, HISTORY_REWRITING, renderer, tokenizer

TEMPLATES = pytest.mark.parametrize("template", [CHATML, HISTORY_REWRITING], ids=["chatml", "history_rewriting"])
BASH = Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
_CACHE = {t: renderer(t) for t in (CHATML, HISTORY_REWRITING)}


def say(role: str, *parts: str | Thinking | ToolCall) -> Message:
    return Message(role, tuple(Text(p) if isinstance(p, str) else p for p in parts))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResult(call_id, text),))


def conversation(*messages: Message, **options) -> Conversation:
    return Conversation(messages, **options)


LONG = (
    say("system", "You are an agent."),
    say("user", "fix it"),
    say("assistant", Thinking("look first"), "I look.", ToolCall("c1", "bash", {"command": "ls"})),
    result("c1", "a.py"),
    say("system", "<left>10</left>"),
    say("assistant", "Done."),
    say("user", "and now?"),
)


@TEMPLATES
def test_appending_never_changes_what_is_there(template):
    r = _CACHE[template]
    whole = r.render(conversation(*LONG, tools=(BASH,)))
    for n in range(1, len(LONG)):
        part = r.render(conversation(*LONG[:n], tools=(BASH,)))
        assert part.ids[: part.ends[-1]] == whole.ids[: whole.ends[n - 1]], n


@TEMPLATES
def test_a_tail_continues_recorded_ids_exactly(template):
    r = _CACHE[template]
    c = conversation(*LONG, tools=(BASH,))
    whole = r.render(c)
    for start in range(len(LONG)):
        head = whole.ids[: whole.ends[start - 1]] if start else []
        tail = r.render_tail(c, start, head[-1] if head else None)
        assert head + tail.ids == whole.ids, start
        assert [len(head) + e for e in tail.ends] == whole.ends[start:], start


@TEMPLATES
def test_a_cut_turn_gets_its_stop_token_in_the_tail(template):
    r = _CACHE[template]
    c = conversation(say("user", "hi"), say("assistant", "half a sen"), say("user", "go on"))
    (stop,) = r.stop_token_ids
    ended = r.render_tail(c, 2, stop)
    cut = r.render_tail(c, 2, r.encode("sen")[-1])
    assert cut.ids == [stop, *ended.ids]
    assert [e + 1 for e in ended.ends] == cut.ends


def test_chatml_equals_the_template_applied_once():
    r = _CACHE[CHATML]
    text = "".join(r._tokenizer.decode(r.render(conversation(*LONG)).ids, skip_special_tokens=False))
    names = {"c1": ("bash", "c1")}
    plain = [r._wording._plain(m, "user" if i else "", names) for i, m in enumerate(LONG)]
    assert text == r._wording._template.text(plain, generate=True)


def test_system_entries_stay_in_place_or_become_a_reminder():  # P01
    for template, expected in ((CHATML, "<|im_start|>system\nAgents: x"), (HISTORY_REWRITING, "<system-reminder>\nAg")):
        r = _CACHE[template]
        c = conversation(say("system", "S"), say("user", "hi"), say("system", "Agents: x"))
        text = r._tokenizer.decode(r.render(c).ids, skip_special_tokens=False)
        assert text.index("hi") < text.index(expected)


def test_joined_tool_results_have_one_boundary():
    r = _CACHE[HISTORY_REWRITING]
    calls = (ToolCall("a", "bash", {"command": "1"}), ToolCall("b", "bash", {"command": "2"}))
    c = conversation(say("user", "x"), say("assistant", *calls), result("a", "one"), result("b", "two"))
    rendered = r.render(c)
    assert rendered.ends[2] == -1
    text = r._tokenizer.decode(rendered.ids, skip_special_tokens=False)
    assert text.count("<|im_start|>user") == 2
    assert "one\n</tool_response><tool_response>\ntwo" in text


def test_a_template_that_always_refuses_is_a_400():
    r = renderer(
        CHATML.replace(
            "{%- if m.role == 'assistant' %}",
            "{%- if m.content == 'bad' %}{{ raise_exception('no') }}{% elif m.role == 'assistant' %}",
        )
    )
    with pytest.raises(Refusal, match="refuses") as refused:
        r.render(conversation(say("user", "ok"), say("user", "bad")))
    assert refused.value.status == 400


def test_loading_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Renderer.load(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "eos_token_id": 3}')
    with pytest.raises(ConfigError, match="chat template"):
        Renderer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML})
    )
    loaded = Renderer.load(tmp_path, context=4096)
    assert loaded.context == 512
    assert loaded.stop_token_ids == sorted({3, *_CACHE[CHATML].stop_token_ids})
    assert loaded.render(conversation(*LONG)) == _CACHE[CHATML].render(conversation(*LONG))


def test_frozen_clock_and_raise_are_there():
    source = (
        "{{ strftime_now('%Y')[:2] }}"
        "{% for m in messages %}{% if m.content == 'x' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert ChatTemplate(source, {}).text([{"content": "x"}, {"content": "é<"}]) == "20é<"


# -- replies -----------------------------------------------------------------------------------------------------------


def parse(text: str, finish: str = "stop", template: str = CHATML, format: str | None = None, **options):
    r = renderer(template, format=format) if format else _CACHE[template]
    return r.parse(r.encode(text) + (r.stop_token_ids if finish == "stop" else []), finish, **options)


def test_parallel_calls_are_separate():  # P05
    text = "\n".join(
        f'<tool_call>\n{{"name":"{n}","arguments":{a}}}\n</tool_call>'
        for n, a in [("a", '{"x":1}'), ("b", '{"y":2}'), ("c", "{}")]
    )
    turn = parse(text)
    assert [(c.name, c.arguments) for c in turn.parts] == [("a", {"x": 1}), ("b", {"y": 2}), ("c", {})]
    assert len({c.call_id for c in turn.calls}) == 3
    assert turn.complete and not turn.malformed


def test_thinking_text_and_call():
    turn = parse('<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>')
    assert turn.parts[:2] == (Thinking("hm"), Text("I look."))
    assert turn.calls[0].name == "a"


def test_a_prompt_that_opens_the_reasoning():
    assert parse("hm\n</think>\n\nyes", template=HISTORY_REWRITING).parts == (Thinking("hm"), Text("yes"))
    assert parse("yes", template=HISTORY_REWRITING, thinking=False).parts == (Text("yes"),)
    cut = parse("hm", "length", template=HISTORY_REWRITING)
    assert cut.parts == (Thinking("hm"),) and not cut.complete


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"bash","arguments":{"cmd":"ls',
        '<tool_call>{"name":"bash","arguments":{"cmd":"ls"}}',
        '<tool_call>{"name":"bash"}</tool_call>',
        '<tool_call>{"name":"bash","arguments":"ls"}</tool_call>',
        '<tool_call>{"name":"bash","arguments":{"n":NaN}}</tool_call>',
        "<tool_call>ls</tool_call>",
        '<tool_call>[{"name":"bash"}]</tool_call>',
    ],
)
def test_a_broken_call_stays_text(text):  # P27
    turn = parse(text, "length")
    assert turn.calls == () and turn.malformed == 1 and not turn.complete
    assert turn.parts == (Text(text),)


def test_tagged_calls_get_their_types_from_the_tool():
    properties = {"path": {"type": "string"}, "line": {"type": "integer"}, "all": {"type": "boolean"}, "x": {}}
    tool = Tool("edit", "", {"type": "object", "properties": properties})
    text = (
        "Now.\n<tool_call>\n<function=edit>\n<parameter=path>\n1\n</parameter>\n<parameter=line>\n3\n</parameter>\n"
        "<parameter=all>\nyes\n</parameter>\n<parameter=new>\n  a\n</parameter>b\n\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    turn = parse(text, tools=(tool,), format="qwen3_coder")
    assert turn.calls[0].arguments == {"path": "1", "line": 3, "all": "yes", "new": "  a\n</parameter>b\n"}
    assert turn.parts[0] == Text("Now.") and turn.calls[0].name == "edit"
    assert parse("<tool_call>\n<function=f>\n</function>\n</tool_call>", format="qwen3_coder").calls[0].arguments == {}
    for cut in (
        "<function=edit>\n<parameter=path>\n1\n",
        "<function=edit>\n<parameter=path>\n1\n</function>",
        "<function=>",
    ):
        turn = parse(f"<tool_call>\n{cut}\n</tool_call>", tools=(tool,), format="qwen3_coder")
        assert turn.calls == () and turn.malformed == 1


def test_stop_strings_cut_the_visible_text():  # P09
    turn = parse("a b STOPHERE c", "stop_sequence", stop=("STOPHERE",))
    assert turn.parts == (Text("a b "),) and turn.stop_sequence == "STOPHERE"
    assert parse("a b", stop=("STOPHERE",)).stop_sequence is None


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_error(text):
    r = _CACHE[CHATML]
    turn = r.parse(r.encode(text), "stop")
    assert all(isinstance(p, Text | Thinking | ToolCall) for p in turn.parts)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_about_meaning():
    def keys(call_id: str, arguments: dict, answer: str = "a.py", tools=(BASH,)):
        messages = [say("user", "x"), say("assistant", ToolCall(call_id, "bash", arguments)), result(call_id, answer)]
        return _CACHE[CHATML].keys(conversation(*messages, tools=tools))

    same = keys("c1", {"a": 1, "b": 2.0})
    assert keys("other", {"b": 2, "a": 1}) == same
    assert keys("c1", {"a": 1, "b": 2}, "b.py")[:2] == same[:2]
    assert keys("c1", {"a": 1, "b": 2}, "b.py")[2] != same[2]
    assert keys("c1", {"a": "1", "b": 2})[1] != same[1]
    assert keys("c1", {"a": 1, "b": 2}, tools=())[0] != same[0]


def test_results_are_told_apart_by_the_call_they_answer():
    calls = say("assistant", ToolCall("a", "bash", {}), ToolCall("b", "bash", {}))
    one = _CACHE[CHATML].keys(conversation(calls, result("a", "x"), result("b", "y")))
    other = _CACHE[CHATML].keys(conversation(calls, result("b", "x"), result("a", "y")))
    assert one[0] == other[0] and one[1] != other[1]
