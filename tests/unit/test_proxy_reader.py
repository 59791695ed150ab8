"""Reading on from what was recorded gives what reading everything gives, whatever a harness sends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.messages import BILLING, Messages
from opengyre.proxy.dialects.responses import Responses
from opengyre.proxy.history import History
from opengyre.proxy.lines import Line, Lines, Note, common_prefix, skeleton
from opengyre.proxy.reader import Request, _mended, read
from opengyre.proxy.refusals import Refusal

DIALECTS = {d.name: d for d in (Messages(), Chat(), Responses())}
each_dialect = pytest.mark.parametrize("name", list(DIALECTS))

WORDS = st.sampled_from(["", "go", "  go\n", "ünï", "𝄞", "\ud83d", "a\udc00b", '"quo\\ted"', "x" * 500])
IDS = st.sampled_from(["c1", "c2", "c3", "unknown"])
INPUT = st.sampled_from([{}, {"a": 1}, {"b": 2.0, "a": [None, "\udfff"]}, {"n": 12345678901234567890123}])


def _either(*options):
    return st.one_of(*(o if isinstance(o, st.SearchStrategy) else st.just(o) for o in options))


def _block(kind: str, **fields):
    return st.fixed_dictionaries({"type": st.just(kind), **fields}, optional={"cache_control": st.just({"type": "e"})})


ENTRIES = {
    "messages": st.one_of(
        st.fixed_dictionaries(
            {
                "role": st.just("user"),
                "content": st.one_of(
                    WORDS,
                    st.lists(
                        st.one_of(
                            _block("text", text=WORDS),
                            _block("tool_result", tool_use_id=IDS, content=WORDS),
                            _block("image", source=st.just({"media_type": "image/png"})),
                        ),
                        max_size=3,
                    ),
                ),
            }
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("assistant"),
                "content": st.lists(
                    st.one_of(
                        _block("text", text=WORDS),
                        _block("thinking", thinking=WORDS, signature=st.just("gyre_1")),
                        _block("tool_use", id=IDS, name=st.just("Bash"), input=INPUT),
                    ),
                    max_size=3,
                ),
            }
        ),
        st.fixed_dictionaries({"role": st.sampled_from(["system", "nobody"]), "content": WORDS}),
    ),
    "chat": st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "developer"]), "content": WORDS}),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": IDS, "content": WORDS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": _either(None, WORDS)},
            optional={
                "reasoning_content": WORDS,
                "tool_calls": st.lists(
                    st.fixed_dictionaries(
                        {
                            "id": IDS,
                            "function": st.fixed_dictionaries({"name": WORDS, "arguments": INPUT.map(json.dumps)}),
                        }
                    ),
                    max_size=2,
                ),
            },
        ),
    ),
    "responses": st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "developer"]), "content": WORDS}),
        st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.just([]), "encrypted_content": WORDS}),
        st.fixed_dictionaries(
            {"type": st.just("function_call"), "call_id": IDS, "name": st.just("f"), "arguments": INPUT.map(json.dumps)}
        ),
        st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": IDS, "output": WORDS}),
        st.just({"type": "image_generation_call"}),
    ),
}
OTHER = {
    "messages": st.fixed_dictionaries(
        {},
        optional={
            "system": st.one_of(WORDS, WORDS.map(lambda w: [{"type": "text", "text": BILLING + w}])),
            "max_tokens": st.integers(1, 9),
            "stream": st.booleans(),
        },
    ),
    "chat": st.fixed_dictionaries({}, optional={"stop": WORDS, "stream": st.booleans(), "n": st.just(float("nan"))}),
    "responses": st.fixed_dictionaries({}, optional={"instructions": WORDS, "stream": st.booleans()}),
}
TOOLS = st.sampled_from([None, [], [{"name": "Bash", "input_schema": {"type": "object"}}]])


@st.composite
def bodies(draw, name: str):
    """Bodies of one session: each goes on from one before, grown, edited or cut, or written in another way."""
    sent: list[list] = [[]]
    out = []
    for _ in range(draw(st.integers(2, 5))):
        entries = list(draw(st.sampled_from(sent)))
        if entries and draw(st.integers(0, 3)) == 0:
            del entries[draw(st.integers(0, len(entries) - 1)) :]
        if entries and draw(st.integers(0, 3)) == 0:
            entries[draw(st.integers(0, len(entries) - 1))] = draw(ENTRIES[name])
        entries += draw(st.lists(ENTRIES[name], max_size=4))
        sent.append(entries)
        history, other = {DIALECTS[name].history: entries}, draw(OTHER[name])
        if (tools := draw(TOOLS)) is not None:
            other["tools"] = tools
        fields = {**history, **other} if draw(st.booleans()) else {**other, **history}
        text = json.dumps(fields, indent=draw(st.sampled_from([None, None, 1])), ensure_ascii=True)
        if draw(st.integers(0, 9)) == 0:
            text = text[:-1] + f', "{DIALECTS[name].history}": {json.dumps(entries[:1])}}}'  # the last one counts
        if draw(st.integers(0, 9)) == 0:
            text = text.replace("]", ",]", 1)
        out.append(text.encode())
    return out


def parsed(dialect, history: History, body: bytes) -> Request | None:
    """By Python's JSON, as one piece; None if it is refused."""
    try:
        fields = json.loads(_mended(body))
        conversation = dialect.parse(fields)
    except (ValueError, Refusal):
        return None
    known = history.read(conversation.messages, keys.seed(conversation.tools), Note())
    conversation = replace(conversation, messages=tuple(known.messages))
    return Request(conversation, known.keys, known.notes[-1] if known.notes else Note())


def attempt(dialect, history: History, body: bytes, line: Line | None = None, cut: int = 0) -> Request | None:
    try:
        return read(dialect, history, body, line, cut)
    except Refusal:
        return None


def same(one: Request | None, other: Request | None) -> None:
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert one.keys == other.keys and one.note == other.note
    bare = [tuple(map(skeleton, r.conversation.messages)) for r in (one, other)]
    assert bare[0] == bare[1]
    assert one.conversation.messages[one.known :] == other.conversation.messages[one.known :]
    empty = [replace(r.conversation, messages=()) for r in (one, other)]
    assert repr(empty[0]) == repr(empty[1])  # NaN differs from itself
    if one.line is not None and other.line is not None:
        for field in ("start", "ends", "counts", "placeholders", "lead", "lead_key", "keys", "notes", "epoch"):
            assert getattr(one.line, field) == getattr(other.line, field), field


@each_dialect
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_reading_on_is_reading_everything(name, data):
    dialect, history, lines = DIALECTS[name], History(), Lines()
    for body in data.draw(bodies(name)):
        line, cut = lines.find("e", name, history.epoch, body)
        got = attempt(dialect, history, body, line, cut)
        same(got, attempt(dialect, history, body))
        same(got, parsed(dialect, history, body))
        if got is None or not got.keys:
            continue
        if got.line is not None and got.line.epoch == history.epoch:
            bare = tuple(map(skeleton, got.line.messages))
            lines.keep("e", replace(got.line, messages=bare), instead=got.grown_from)
        if data.draw(st.booleans()):
            turn = Message("assistant", (Thinking("why", "gyre_1"), Text("go"), ToolCall("c1", "Bash", {"a": 1})))
            history.remember(got.keys[-1], turn, delivered=data.draw(st.booleans()))


def body_of(n: int, **changes) -> bytes:
    entries = [{"role": "user", "content": f"message {i}"} for i in range(n)]
    return json.dumps({"model": "m", "messages": entries, **changes}).encode()


def test_only_what_is_new_is_read():
    history, lines = History(), Lines()
    first = read(Messages(), history, body_of(40))
    assert first.known == 0 and first.line is not None
    lines.keep("e", first.line)
    line, cut = lines.find("e", "messages", 0, body_of(42))
    second = read(Messages(), history, body_of(42), line, cut)
    assert (cut, second.known, len(second.keys)) == (40, 40, 42) and second.keys[:40] == first.keys
    assert second.grown_from is line
    assert lines.find("e", "messages", 1, body_of(42)) == lines.find("f", "messages", 0, body_of(42)) == (None, 0)


def test_a_run_of_results_that_goes_on_is_read_again():
    """Results are sorted by their call: a later one may come to stand before an earlier one."""
    call = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b")],
    }
    entries = [{"role": "user", "content": "go"}, call]
    for i in ("b", "a"):
        entries.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": i}]})
    history, lines = History(), Lines()
    first = read(Messages(), history, json.dumps({"messages": entries[:3]}).encode())
    assert first.line is not None
    lines.keep("e", first.line)
    both = json.dumps({"messages": entries}).encode()
    line, cut = lines.find("e", "messages", 0, both)
    got = read(Messages(), history, both, line, cut)
    assert (cut, got.known) == (3, 2) and got.keys == read(Messages(), history, both).keys
    assert [p.call_id for m in got.conversation.messages[2:] for p in m.parts] == ["a", "b"]


def test_a_history_cut_within_a_turn_or_a_run_is_read_from_before_it():
    """What the line knows of the last message there has parts, or an order, that came from entries after the cut."""
    history, lines = History(), Lines()
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    turn = [
        {"type": "reasoning", "encrypted_content": "r", "summary": []},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
    ]
    results = [{"type": "function_call_output", "call_id": i, "output": i} for i in ("b", "a")]
    user = {"role": "user", "content": "go"}
    first = read(Responses(), history, json.dumps({"input": [user, *turn, *results]}).encode())
    assert first.line is not None
    lines.keep("e", first.line)
    cases = (([user, *turn[:2]], 1), ([user, *turn, results[0]], 2), ([user, *turn, results[0], user], 2))
    for entries, known in cases:
        body = json.dumps({"input": entries}).encode()
        line, cut = lines.find("e", "responses", 0, body)
        got = read(Responses(), history, body, line, cut)
        assert cut >= 3 and got.known == known and got.keys == read(Responses(), history, body).keys


def test_a_turn_learned_later_is_read_anew():
    """What a strange turn was read as is not kept once the history knows better."""
    history = History()
    said = {"role": "assistant", "content": "hello"}
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "and"}]}
    ).encode()
    strange = read(Chat(), history, body)
    epoch = history.epoch
    turn = Message("assistant", (Thinking("a greeting", "gyre_1"), Text("hello")))
    history.remember(strange.keys[0], turn, delivered=True)
    assert history.epoch == epoch + 1
    assert read(Chat(), history, body).conversation.messages[1] == turn


def test_the_quietest_executions_lines_go_first_when_memory_is_short():
    history = History()
    line = read(Messages(), history, body_of(40)).line
    assert line is not None
    lines = Lines(budget_bytes=3 * line.size)
    for execution in ("a", "b", "c"):
        lines.keep(execution, line)
    lines.keep("a", line, instead=line)
    lines.keep("d", line)
    kept = [e for e in "abcd" if lines.find(e, "messages", 0, body_of(40))[1]]
    assert kept == ["a", "c", "d"] and len(lines) == 3
    lines.forget("a")
    assert len(lines) == 2


def test_an_agent_among_others_finds_its_own_line():
    history, lines = History(), Lines()
    for agent in range(4):
        line = read(Messages(), history, body_of(9, system=f"agent {agent}")).line
        assert line is not None
        lines.keep("e", line)
    body = body_of(10, system="agent 2")
    found, cut = lines.find("e", "messages", 0, body)
    assert cut == 9 and found is not None and read(Messages(), history, body, found, cut).known == 10


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300), st.integers(1, 400))
@settings(deadline=None)
def test_common_prefix(head, a, b, times):
    a, b = head * times + a, head * times + b
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


@given(st.text(st.characters(), max_size=8))
def test_half_pairs_become_the_replacement_character(text):
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(_mended(json.dumps(text).encode())) == whole
