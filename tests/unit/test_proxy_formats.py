"""Every family keeps the promises of rendering: nothing forks that only grew, sampled ids stay, turns read as said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from families import FAMILIES, renderer
from opengyre.errors import ConfigError
from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.formats.registry import FORMATS, choose
from opengyre.proxy.render import NO_BOUNDARY, Renderer
from opengyre.proxy.stream import TextStream

ALL = pytest.mark.parametrize("family", FAMILIES)
TOOL = Tool(
    "edit",
    "Change a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "all": {"type": "boolean"},
            "more": {"type": "object"},
            "one_of": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
)
# No characters that a marker begins with: what a marker in words does is tested by itself.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<[{｜◁")
WORDS = st.text(CHARACTERS, max_size=20).map(lambda s: s.strip()).filter(bool)
RAW = st.text(st.one_of(CHARACTERS, st.sampled_from('\n "\\{}')), max_size=20)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": RAW,
        "line": st.integers(-5, 1 << 40),
        "all": st.booleans(),
        "more": st.dictionaries(WORDS, st.one_of(RAW, st.integers(), st.none(), st.lists(st.booleans())), max_size=2),
        "one_of": st.one_of(st.none(), st.integers()),
    },
)


@st.composite
def turns(draw, family: str) -> Message:
    """An assistant turn that the family's model can say."""
    single = family == "llama3"  # a bare call is the whole text
    calls = draw(st.lists(ARGUMENTS, max_size=1 if single else 3))
    parts: list[Part] = [Thinking(draw(WORDS))] if draw(st.booleans()) else []
    if not calls or (draw(st.booleans()) and not single):
        parts.append(Text(draw(WORDS)))
    return Message("assistant", (*parts, *(ToolCall("", "edit", a) for a in calls)))


@st.composite
def conversations(draw, family: str) -> Conversation:
    """A conversation as harnesses have them, system entries and several user messages in a row included."""
    messages = [Message("system", (Text(f"You are an agent {n}."),)) for n in range(draw(st.integers(0, 2)))]
    messages.append(Message("user", (Text(draw(WORDS)),)))
    for n in range(draw(st.integers(1, 3))):
        turn = draw(turns(family))
        calls = [p for p in turn.parts if isinstance(p, ToolCall)]
        named = [ToolCall(f"call0{n}{k}00", c.name, c.arguments) for k, c in enumerate(calls)]
        messages.append(Message("assistant", (*(p for p in turn.parts if not isinstance(p, ToolCall)), *named)))
        messages += [Message("tool", (ToolResult(c.call_id, draw(WORDS)),)) for c in named]
        for role in draw(st.lists(st.sampled_from(["user", "system"]), min_size=0 if calls else 1, max_size=2)):
            messages.append(Message(role, (Text(draw(WORDS)),)))
    tools = (TOOL,) if draw(st.booleans()) else ()
    return Conversation(tuple(messages), tools, thinking=draw(st.sampled_from([None, True, False])))


def said(r: Renderer, turn: Message, opened: bool) -> str:
    """The text a model samples to say ``turn``."""
    if (written := r.format.write(turn)) is not None:
        return written.removeprefix("<|start|>assistant").removesuffix("<|end|>").removesuffix("<|call|>")
    begin, end = r.format.think
    thinking = "".join(p.text for p in turn.parts if isinstance(p, Thinking))
    words = "".join(p.text for p in turn.parts if isinstance(p, Text))
    calls = [(p.name, p.arguments) for p in turn.parts if isinstance(p, ToolCall)]
    text = f"{'' if opened else begin}\n{thinking}\n{end}\n\n" if thinking or opened else ""
    return text + words + ("\n" if words and calls else "") + (r.format.write_calls(calls) if calls else "")


def nameless(message: Message) -> list[object]:
    """A message without the ids of its calls."""
    return [("call", p.name, p.arguments) if isinstance(p, ToolCall) else p for p in message.parts]


def text_of(r: Renderer, ids: list[int]) -> str:
    return r._tokenizer.decode(ids, skip_special_tokens=False)


# -- prompts -----------------------------------------------------------------------------------------------------------


@ALL
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_only_grew_never_changes(family, data):
    r, c = renderer(family), data.draw(conversations(family))
    whole = r.render(c)
    for n in range(2, len(c.messages)):
        part = r.render(Conversation(c.messages[:n], c.tools, thinking=c.thinking))
        if (end := whole.ends[n - 1]) != NO_BOUNDARY:
            assert part.ids[: part.ends[-1]] == whole.ids[:end]
            tail = r.render_tail(c, n, whole.ids[end - 1])
            assert whole.ids[:end] + tail.ids == whole.ids
            assert [e if e == NO_BOUNDARY else e + end for e in tail.ends] == whole.ends[n:]


@ALL
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_an_agent_loop_grows_one_line(family, data):
    """Prompt and reply, prompt and reply: each prompt begins with all that was rendered and sampled before."""
    r, c = renderer(family), data.draw(conversations(family))
    line: list[int] = []
    recorded = 0  # messages in ``line``
    for n, message in enumerate(c.messages):
        if message.role != "assistant":
            continue
        asked = Conversation(c.messages[:n], c.tools, thinking=c.thinking)
        tail = r.render_tail(asked, recorded, line[-1] if line else None)
        line += tail.ids
        opened = r.opens_thinking(c.thinking, c.messages[n - 1].role)
        sampled = r.encode(said(r, message, opened))
        if data.draw(st.booleans()):  # ended by the policy, with any of its stop tokens
            stop = data.draw(st.sampled_from(r.stop_token_ids))
            turn = r.parse([*sampled, stop], "stop", thinking=c.thinking, after=c.messages[n - 1].role, tools=(TOOL,))
            assert nameless(turn.message) == nameless(message) and turn.complete and not turn.malformed
            line += [*sampled, stop]
        else:
            line += sampled
        recorded = n + 1
    text = text_of(r, line + r.render_tail(c, recorded, line[-1]).ids)
    for message in c.messages:
        for part in message.parts:
            if isinstance(part, Text | Thinking):
                assert part.text in text
    for stop in r.stop_token_ids:
        token = r._tokenizer.id_to_token(stop)
        assert f"{token}{token}" not in text  # an end that was sampled is not written again


# -- turns -------------------------------------------------------------------------------------------------------------


@ALL
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_turn_streams_as_prefixes_of_what_is_read(family, data):
    r, turn = renderer(family), data.draw(turns(family))
    thinking, after = data.draw(st.sampled_from([None, True, False])), data.draw(st.sampled_from(["user", "tool"]))
    ids = r.encode(said(r, turn, r.opens_thinking(thinking, after)))
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    finish = data.draw(st.sampled_from(["stop", "length"]))
    read = r.parse(ids, finish, thinking=thinking, after=after, tools=(TOOL,))
    stream, got, kinds = TextStream(r, (), thinking, after), {"thinking": "", "text": ""}, list[str]()
    step = data.draw(st.integers(1, 4))
    for i in range(0, len(ids), step):
        for kind, text in stream.feed(ids[i : i + step]):
            got[kind] += text
            kinds.append(kind)
    assert kinds == sorted(kinds, reverse=True)  # no thinking after text
    for kind, cls in (("thinking", Thinking), ("text", Text)):
        assert "".join(p.text for p in read.parts if isinstance(p, cls)).startswith(got[kind])


_PIECES = ["\n", " ", "a", "é", '{"x": 1}', "json", "to=a.b", "to=functions.edit ", "edit", '">', "analysis", "STOP"]
_MARKUP = sorted({*_PIECES, *(marker for made in FORMATS.values() for marker in made.markers)})


@ALL
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_markup_is_read_and_streams_as_a_prefix(family, data):
    r = renderer(family)
    own = st.sampled_from([*r.format.markers, "\n", "a", "STOP"])
    pieces = data.draw(st.lists(st.one_of(own, st.sampled_from(_MARKUP)), max_size=12))
    ids, stop = r.encode("".join(pieces)), data.draw(st.sampled_from([(), ("STOP",)]))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    read = r.parse(ids, finish, stop=stop, tools=(TOOL,))
    stream, got = TextStream(r, stop, None), {"thinking": "", "text": ""}
    for token in ids:
        for kind, text in stream.feed([token]):
            got[kind] += text
    for kind, cls in (("thinking", Thinking), ("text", Text)):
        assert "".join(p.text for p in read.parts if isinstance(p, cls)).startswith(got[kind])


@ALL
def test_a_cut_call_stays_text_and_is_counted(family):
    r = renderer(family)
    turn = Message("assistant", (ToolCall("", "edit", {"path": "a.py", "line": 3}),))
    opened = r.opens_thinking(None)
    ids = r.encode(said(r, turn, opened))
    whole = r.parse(ids, "stop", tools=(TOOL,))
    assert nameless(whole.message) == nameless(turn)
    n = len(ids) - len(r.encode("}")) - 8 if family == "llama3" else len(ids) * 3 // 4
    cut = r.parse(ids[:n], "length", tools=(TOOL,))
    assert cut.calls == () and cut.malformed == 1 and not cut.complete
    assert "edit" in text_of(r, ids[:n]) and any(isinstance(p, Text) for p in cut.parts)


def test_a_call_after_a_cut_one_is_still_read():
    r = renderer("deepseek")
    text = r.format.write_calls([("edit", {"path": "a"}), ("edit", {"path": "b"})])
    cut = r.parse(r.encode(text[: text.rindex('"b"')]), "length", tools=(TOOL,))
    assert [c.arguments for c in cut.calls] == [{"path": "a"}] and cut.malformed == 1


# -- families one by one -----------------------------------------------------------------------------------------------


def test_glm_turns_end_with_the_next_role():
    r = renderer("glm")
    names = {r._tokenizer.id_to_token(i) for i in r.stop_token_ids}
    assert names == {"<|user|>", "<|observation|>", "<|endoftext|>"}
    call = Message("assistant", (ToolCall("c1", "edit", {}),))
    c = Conversation((Message("user", (Text("x"),)), call, Message("tool", (ToolResult("c1", "ok"),))))
    observation, user = (r._tokenizer.token_to_id(t) for t in ("<|observation|>", "<|user|>"))
    as_meant = r.render_tail(c, 2, observation)
    assert text_of(r, as_meant.ids) == "<tool_response>\nok\n</tool_response><|assistant|>"
    assert text_of(r, r.render_tail(c, 2, user).ids).startswith("<|observation|><tool")  # it expected somebody else
    assert r.render_tail(c, 2, r.encode("a")[-1]).ids == [observation, *as_meant.ids]
    assert [e + 1 for e in as_meant.ends] == r.render_tail(c, 2, user).ends


def test_deepseek_goes_on_after_results_without_being_asked():
    r = renderer("deepseek")
    call = Message("assistant", (ToolCall("c1", "edit", {}),))
    c = Conversation((Message("user", (Text("x"),)), call, Message("tool", (ToolResult("c1", "ok"),))), thinking=True)
    assert text_of(r, r.render(c).ids).endswith("<｜tool▁output▁begin｜>ok<｜tool▁output▁end｜>")
    assert r.opens_thinking(True, "user") and not r.opens_thinking(True, "tool")
    assert r.parse(r.encode("fine"), "stop", thinking=True, after="tool").parts == (Text("fine"),)
    assert r.parse(r.encode("hm</think>fine"), "stop", thinking=True).parts == (Thinking("hm"), Text("fine"))


def test_arguments_as_text_and_calls_without_content():
    r = renderer("deepseek_v3")
    call = ToolCall("c1", "edit", {"path": "ü"})
    with_words = Message("assistant", (Text("I look."), call))
    text = text_of(r, r.render(Conversation((Message("user", (Text("x"),)), Message("assistant", (call,))))).ids)
    assert 'function<｜tool▁sep｜>edit\n```json\n{"path": "ü"}\n```<｜tool▁call▁end｜>' in text
    both = text_of(r, r.render(Conversation((Message("user", (Text("x"),)), with_words))).ids)
    assert "I look." in both and '{"path": "ü"}' in both  # the template would drop the call


def test_harmony_channels_recipients_and_ends():
    r = renderer("harmony")
    assert {r._tokenizer.id_to_token(i) for i in r.stop_token_ids} == {"<|call|>", "<|return|>", "<|endoftext|>"}
    for header in (
        "<|channel|>commentary to=functions.edit <|constrain|>json",
        " to=functions.edit<|channel|>commentary json",
    ):
        text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{header}<|message|>{{}}<|call|>"
        turn = r.parse(r.encode(text), "stop")
        assert turn.parts[0] == Thinking("hm") and [(c.name, c.arguments) for c in turn.calls] == [("edit", {})]
    blocks = "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>"
    words = "<|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Then.<|return|>"
    turn = r.parse(r.encode(f"{blocks}{words}{final}"), "stop")
    assert turn.parts == (Thinking("one\ntwo"), Text("First.\nThen."))
    cut = r.parse(r.encode("<|channel|>analysis<|message|>on and on"), "length")
    assert cut.parts == (Thinking("on and on"),) and not cut.complete
    broken = r.parse(r.encode("<|channel|>commentary to=functions.edit<|message|>{x}<|call|>"), "stop")
    assert broken.parts == (Text("{x}"),) and broken.malformed == 1


def test_harmony_keeps_what_its_template_would_drop():
    r = renderer("harmony")
    calls = (ToolCall("a", "edit", {"path": "1"}), ToolCall("b", "read", {}))
    messages = (
        Message("user", (Text("x"),)),
        Message("assistant", (Thinking("hm"), Text("Both."), *calls)),
        Message("tool", (ToolResult("a", "one"),)),
        Message("tool", (ToolResult("b", "two"),)),
        Message("system", (Text("left: 10"),)),
    )
    text = text_of(r, r.render(Conversation(messages)).ids)
    assert "analysis<|message|>hm<|end|>" in text and "commentary<|message|>Both.<|end|>" in text
    assert 'functions.edit to=assistant<|channel|>commentary<|message|>"one"' in text
    assert 'functions.read to=assistant<|channel|>commentary<|message|>"two"' in text
    assert text.endswith("<|start|>developer<|message|>left: 10<|end|><|start|>assistant")


def test_kimi_results_carry_the_ids_that_the_model_gave():
    r = renderer("kimi")
    first = Message("assistant", (ToolCall("toolu_1", "edit", {}), ToolCall("toolu_2", "read", {})))
    results = (Message("tool", (ToolResult("toolu_1", "one"),)), Message("tool", (ToolResult("toolu_2", "two"),)))
    again = (
        Message("assistant", (ToolCall("toolu_3", "edit", {}),)),
        Message("tool", (ToolResult("toolu_3", "three"),)),
    )
    text = text_of(r, r.render(Conversation((Message("user", (Text("x"),)), first, *results, *again))).ids)
    for shown in ("functions.edit:0\none", "functions.read:1\ntwo", "functions.edit:2\nthree"):
        assert f"## Return of {shown}" in text
    assert "toolu" not in text


def test_what_a_template_has_no_words_for_is_said_in_the_formats_own():
    r = renderer("plain")
    call = ToolCall("c1", "edit", {"path": "a"})
    messages = (
        Message("system", (Text("You are an agent."),)),
        Message("user", (Text("x"),)),
        Message("assistant", (Text("I look."), call)),
        Message("tool", (ToolResult("c1", "ok"),)),
    )
    text = text_of(r, r.render(Conversation(messages, (TOOL,))).ids)
    assert "You are an agent." in text and '"name": "edit"' in text and "\nok<end_of_turn>" in text
    assert '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>' in text
    assert r.stop_token_ids == sorted(r._known(["<end_of_turn>", "<|endoftext|>"]))


def test_a_system_message_beside_the_user_turn_is_not_lost():
    r = renderer("mistral")
    c = Conversation((Message("system", (Text("S"),)), Message("user", (Text("x"),))), (TOOL,))
    text = text_of(r, r.render(c).ids)
    assert text.endswith("[INST]S\n\nx[/INST]") and "[AVAILABLE_TOOLS]" in text and r.render(c).ends[0] == NO_BOUNDARY


def test_a_tool_without_parameters_is_no_reason_to_refuse():
    template = FAMILIES["chatml"].template.replace(
        "{{ t | tojson }}", "{{ t | tojson }}{% for k in t.function.parameters.properties.items() %}{% endfor %}"
    )
    r = policies.renderer(template)
    bare = Tool("now", "Tell the time.", {})
    text = text_of(r, r.render(Conversation((Message("user", (Text("x"),)),), (bare,))).ids)
    assert '"name": "now"' in text


def test_what_stands_behind_a_conversation_is_not_part_of_it():
    r = renderer("ending")
    c = Conversation((Message("user", (Text("x"),)), Message("assistant", (Text("y"),)), Message("user", (Text("z"),))))
    assert (
        text_of(r, r.render(c).ids)
        == "<|user|>\nx<|end|>\n<|assistant|>\ny<|end|>\n<|user|>\nz<|end|>\n<|assistant|>\n"
    )


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_in_several_blocks_empty_blocks_and_markers_in_words():
    r = renderer("chatml")

    def parts(text: str):
        return r.parse(r.encode(text), "stop").parts

    assert parts("<think>\na\n</think>\n<think>\nb\n</think>\n\nc") == (Thinking("a\nb"), Text("c"))
    assert parts("<think>\n\n</think>\n\nc") == (Text("c"),)
    assert parts("say <think>x</think> y") == (Text("say <think>x</think> y"),)


def test_a_call_ends_reasoning_that_was_never_closed():
    r = renderer("qwen3_coder")
    call = r.format.write_calls([("edit", {"path": "a"})])
    turn = r.parse(r.encode(f"hm\n{call}"), "stop", tools=(TOOL,))
    assert turn.parts[0] == Thinking("hm") and turn.calls[0].arguments == {"path": "a"} and turn.complete
    closed = r.parse(r.encode(f"hm {call}\n</think>\n\nfine"), "stop", tools=(TOOL,))
    assert closed.calls == () and closed.parts[-1] == Text("fine")
    assert r.parse(r.encode(f"hm\n{call}"), "length", tools=(TOOL,)).calls == ()  # it may have gone on


# -- choice ------------------------------------------------------------------------------------------------------------


def test_a_format_can_be_named_and_an_unknown_one_is_refused_with_the_list():
    assert choose(FAMILIES["glm"].template, "hermes").name == "hermes"
    with pytest.raises(ConfigError, match=r"model\.format.*hermez|hermez.*model\.format") as refused:
        choose("", "hermez")
    assert all(name in str(refused.value) for name in FORMATS)


def test_a_template_whose_calls_nobody_reads_is_refused_unless_a_format_is_named(tmp_path):
    template = FAMILIES["chatml"].template.replace("tool_call>", "invocation>")
    renderer("chatml")._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"model\.format"):
        Renderer.load(tmp_path)
    assert Renderer.load(tmp_path, format="generic").format.name == "generic"
