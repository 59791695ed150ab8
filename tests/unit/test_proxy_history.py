"""Harnesses rewrite what the policy said; the proxy recognises it all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall, ToolResult
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.history import History
from opengyre.proxy.lines import Note
from opengyre.proxy.reply import mint_for, signature, stem
from opengyre.record.call import STEM

GOLDEN = Path(__file__).parent.parent / "golden"
REWRITTEN = json.loads((GOLDEN / "claude_code" / "rewritten_turns.json").read_text())

USER = Message("user", (Text("go"),))
SAID = Message(
    "assistant",
    (
        Thinking("why", "gyre_1"),
        Text("I edit."),
        ToolCall("toolu_1", "Task", {"b": 1.0, "a": "x  \ny"}),
        ToolCall("toolu_2", "Bash", {"command": "cd /w && ls"}),
    ),
)


def results(*ids: str) -> tuple[Message, ...]:
    return tuple(Message("tool", (ToolResult(i, f"result {n}"),)) for n, i in enumerate(ids))


def read(history: History, *messages: Message):
    return history.read(messages, keys.seed(()), Note())


@pytest.fixture
def history() -> History:
    made = History()
    made.remember(read(made, USER).keys[-1], SAID, delivered=True)
    return made


def rewritten(**changes) -> Message:
    parts = {
        "thinking": Thinking("why", "gyre_1"),
        "text": Text("I edit."),
        "one": ToolCall("toolu_1", "Agent", {"a": "x\ny", "b": 1, "replace_all": False}),
        "two": ToolCall("toolu_2", "Bash", {"command": "ls", "description": "d"}),
    }
    return Message("assistant", tuple(p for p in {**parts, **changes}.values() if p is not None))


@pytest.mark.parametrize(
    "back",
    [
        SAID,
        rewritten(),
        rewritten(thinking=Thinking("", "gyre_1")),  # text emptied, signature kept
        rewritten(thinking=Thinking("why", "")),
        rewritten(thinking=None),
        rewritten(text=Text("I edit. ")),
    ],
)
def test_a_rewritten_turn_is_the_original(history, back):  # P10
    expected = read(history, USER, SAID, *results("toolu_1", "toolu_2"))
    got = read(history, USER, back, *results("toolu_1", "toolu_2"))
    assert got == expected and got.messages[1] == SAID


def test_a_turn_that_says_something_else_forks_but_keeps_its_arguments(history):
    got = read(history, USER, rewritten(text=Text("I do not.")))
    assert got.keys[0] == read(history, USER, SAID).keys[0] and got.keys[1] != read(history, USER, SAID).keys[1]
    assert got.messages[1].parts[-1] == SAID.parts[-1]


def test_results_are_put_in_call_order(history):
    a = read(history, USER, SAID, *results("toolu_1", "toolu_2"))
    swapped = results("toolu_1", "toolu_2")[::-1]
    assert read(history, USER, SAID, *swapped) == a


def test_ids_take_no_part(history):  # P28
    def chain(one: str, two: str):
        said = rewritten(one=ToolCall(one, "f", {"x": 1}), two=ToolCall(two, "g", {}), thinking=None)
        return read(History(), USER, said, *results(one, two)).keys

    assert chain("call_0", "call_1") == chain("functions.bash:0", "b") and len(chain("same", "same")) == 4


def test_plain_words_are_found_by_their_place():
    history = History()
    here, there = USER, Message("user", (Text("other"),))
    first, second = (Message("assistant", (Thinking(t), Text("Done."))) for t in ("one", "two"))
    history.remember(read(history, here).keys[-1], first, delivered=True)
    history.remember(read(history, there).keys[-1], second, delivered=True)
    plain = Message("assistant", (Text("Done."),))
    assert read(history, here, plain).messages[1] == first
    assert read(history, there, plain).messages[1] == second


def test_an_undelivered_turn_is_not_taken_for_the_delivered_one():
    history = History()
    lost, kept = (Message("assistant", (Thinking(t), Text("Done."))) for t in ("lost", "kept"))
    key = read(history, USER).keys[-1]
    history.remember(key, kept, delivered=True)
    history.remember(key, lost, delivered=False)
    assert read(history, USER, Message("assistant", (Text("Done."),))).messages[1] == kept


def test_minted_ids_name_their_call_and_no_others_do():
    call_id = "0123456789abcdef" * 2
    mint = mint_for(call_id)
    minted = [mint(), mint(), signature(call_id)]
    assert len(set(minted)) == 3 and {stem(name) for name in minted} == {call_id[:STEM]}
    foreign = [
        "",
        "toolu_01A09q90qw90lq917835lq9",
        "call_0123456789abcdef01230000",
        f"toolu_{call_id[:STEM]}",
        "gyre_1",
    ]
    assert [stem(name) for name in foreign] == [None] * len(foreign)


def test_of_turns_in_one_place_the_first_that_was_seen_stays():
    history = History()
    lost, kept, other = (Message("assistant", (Thinking(t, f"gyre_{t}"), Text("Done."))) for t in ("a", "b", "c"))
    plain = Message("assistant", (Text("Done."),))
    key = read(history, USER).keys[-1]
    history.remember(key, lost, delivered=False)
    history.remember(key, kept, delivered=True)
    assert history.epoch == 1 and read(history, USER, plain).messages[1] == kept
    history.remember(key, other, delivered=True)
    assert history.epoch == 1 and read(history, USER, plain).messages[1] == kept
    assert [read(history, USER, said).messages[1] for said in (lost, kept, other)] == [lost, kept, other]


@pytest.mark.parametrize("back", [Text("Done."), Thinking("", "gyre_a")], ids=["by its place", "by its id"])
def test_a_turn_that_came_back_was_seen_though_it_was_not_delivered(back):
    history = History()
    lost, other = (Message("assistant", (Thinking(t, f"gyre_{t}"), Text("Done."))) for t in ("a", "b"))
    key = read(history, USER).keys[-1]
    history.remember(key, lost, delivered=False)
    read(history, USER, Message("assistant", tuple({back, Text("Done.")})))
    history.remember(key, other, delivered=True)
    assert history.epoch == 0 and read(history, USER, Message("assistant", (Text("Done."),))).messages[1] == lost


def sent(step: dict) -> Message:
    """A turn as it was given to the client: tool inputs in their raw form."""
    content = [
        {**b, "input": json.loads(b["raw"])} if "raw" in b else b
        for b in step["sent"]
        if b["type"] in ("thinking", "text", "tool_use")
    ]
    return Messages().parse({"messages": [{"role": "assistant", "content": content}]}).messages[0]


@pytest.mark.parametrize("step", REWRITTEN, ids=[step["step"] for step in REWRITTEN])
def test_turns_rewritten_by_claude_code_are_the_originals(step):
    """Captured from Claude Code 2.1.220: what it was sent, and what it sent back as its history."""
    history, original = History(), sent(step)
    asked = read(history, USER)
    history.remember(asked.keys[-1], original, delivered=True)
    back = Messages().parse({"messages": [{"role": "assistant", "content": step["came_back"]}]}).messages[0]
    got = read(history, USER, back)
    assert got.messages[1] == original
    assert got.keys[1] == keys.extend(asked.keys[-1], original)
