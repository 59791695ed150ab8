"""What harnesses do to a turn before they send it back, through the real door: nothing that only grew forks, and what
was edited forks where it was edited and says why.

Each rewriting is one that a harness was seen to do (Claude Code 2.1.220, opencode 1.18.33, Codex 0.171.0, Qwen Code
0.15.10, mini-swe-agent 2.4.6).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from door import Door, opened
from policies import CHATML, HISTORY_REWRITING
from wire import CLIENTS, Entry, call

TOOLS = ("Agent", "Bash", "Edit", "Read", "TaskOutput", "Write", "f")
THINK = "<think>\n why \n</think>\n\n"


@dataclass(frozen=True)
class Rewriting:
    """``said`` is what the policy samples; ``back`` turns what the client got into what it keeps."""

    name: str
    said: str
    back: Callable[[list[Entry]], list[Entry] | None]
    dialect: str = "messages"
    reverse_results: bool = False


def inputs(*values: Any, names: tuple[str, ...] = ()) -> Callable[[list[Entry]], None]:
    """Messages: the inputs (and names) of the turn's calls, as the client keeps them."""

    def back(turn: list[Entry]) -> None:
        blocks = [b for b in turn[0]["content"] if b["type"] == "tool_use"]
        for block, value in zip(blocks, values, strict=True):
            block["input"] = value
        for block, name in zip(blocks, names, strict=False):
            block["name"] = name

    return back


def blocks(edit: Callable[[list[Entry]], list[Entry]]) -> Callable[[list[Entry]], None]:
    def back(turn: list[Entry]) -> None:
        turn[0]["content"] = edit(turn[0]["content"])

    return back


def arguments(value: str) -> Callable[[list[Entry]], None]:
    """Chat: the arguments of the turn's first call, as the client keeps them."""

    def back(turn: list[Entry]) -> None:
        turn[0]["tool_calls"][0]["function"]["arguments"] = value

    return back


def message(**fields: Any) -> Callable[[list[Entry]], None]:
    """Chat: fields of the turn's message, as the client keeps them; None removes one."""

    def back(turn: list[Entry]) -> None:
        for name, value in fields.items():
            turn[0].pop(name, None)
            if value is not None:
                turn[0][name] = value

    return back


def trimmed(turn: list[Entry]) -> None:
    turn[0]["reasoning_content"] = turn[0]["reasoning_content"].strip()


def without(kind: str) -> Callable[[list[Entry]], list[Entry]]:
    return lambda content: [b for b in content if b["type"] != kind]


def emptied(content: list[Entry]) -> list[Entry]:
    return [{**b, "thinking": ""} if b["type"] == "thinking" else b for b in content]


def unsigned(content: list[Entry]) -> list[Entry]:
    return [{**b, "signature": ""} if b["type"] == "thinking" else b for b in content]


def stripped(content: list[Entry]) -> list[Entry]:
    return [{**content[0], "text": content[0]["text"].strip()}, *content[1:]]


def cached(content: list[Entry]) -> list[Entry]:
    return [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}]


def foreign_ids(turn: list[Entry]) -> None:
    for i, block in enumerate(b for b in turn[0]["content"] if b["type"] == "tool_use"):
        block["id"] = f"functions.f:{i}"


def same(_: list[Entry]) -> None:
    return None


TWO = f"Two.\n{call('f', {'n': 1})}\n{call('f', {'n': 2})}"
BIG = '{"n": 1.0, "list": [1.0, 2.50, 1e3], "big": 12345678901234567891, "minus": -0.0, "tiny": 1e-7}'
JS = {"n": 1, "list": [1, 2.5, 1000], "big": 12345678901234567000, "minus": 0, "tiny": 1e-7}
RAW = {"__unparsedToolInput": {"raw": '{"command": ', "len": 12}}

REWRITINGS = [
    Rewriting("nothing", f"{THINK}I do.\n{call('f', {'x': 1})}", same),
    # JavaScript reads JSON and writes it again
    Rewriting("numbers", call("f", BIG), inputs(JS)),
    Rewriting("whitespace", call("f", '{ "b":1,\n "a" :{"y":2, "x":[ ]} }'), inputs({"b": 1, "a": {"y": 2, "x": []}})),
    Rewriting("integer keys first", call("f", '{"b": 1, "2": 2, "1": 3}'), inputs({"1": 3, "2": 2, "b": 1})),
    Rewriting("duplicate keys", call("f", '{"x": 1, "y": 2, "x": 3}'), inputs({"x": 3, "y": 2})),
    Rewriting("escaped slash", call("f", '{"p": "a\\/b"}'), inputs({"p": "a/b"})),
    Rewriting("lone surrogate", call("f", '{"p": "a\\ud800b"}'), same),
    Rewriting("literal escapes", call("f", '{"p": "\\\\u00e9"}'), inputs({"p": "é"})),
    Rewriting("unicode", call("f", '{"p": "\\u00e9\\ud83d\\ude00\\u2028"}'), inputs({"p": "é😀\u2028"})),
    # Claude Code knows its tools
    Rewriting("Bash order", call("Bash", {"timeout": 5, "command": "ls"}), inputs({"command": "ls", "timeout": 5})),
    Rewriting("Bash cd", call("Bash", {"command": "cd /w && ls"}), inputs({"command": "ls"})),
    Rewriting("Bash semicolon", call("Bash", {"command": "find {} \\\\;"}), inputs({"command": "find {} \\;"})),
    Rewriting("Bash coerced", call("Bash", {"command": "ls", "timeout": "5"}), inputs({"command": "ls", "timeout": 5})),
    Rewriting("Bash null", call("Bash", {"command": "ls", "description": None}), inputs({"command": "ls"})),
    Rewriting(
        "Edit",
        call("Edit", {"file_path": "/f", "old_str": "a", "new_str": "b  \nc\t"}),
        inputs({"replace_all": False, "file_path": "/f", "old_string": "a", "new_string": "b\nc"}),
    ),
    Rewriting(
        "Write",
        call("Write", {"content": "a  \nb ", "file_path": "/f"}),
        inputs({"file_path": "/f", "content": "a\nb"}),
    ),
    Rewriting("Read", call("Read", {"file_path": "/f", "offset": "1"}), inputs({"file_path": "/f", "offset": 1})),
    Rewriting(
        "TaskOutput", call("TaskOutput", {"task_id": "z"}), inputs({"task_id": "z", "block": True, "timeout": 30000})
    ),
    Rewriting("Task", call("Task", {"prompt": "p"}), inputs({"prompt": "p"}, names=("Agent",))),
    Rewriting("unparsed", call("Bash", {"command": "ls"}), inputs(RAW)),
    # turns
    Rewriting("text after a call", f"{call('f', {})}\nafter", same),
    Rewriting("blank text beside a call", f"\n \n{call('f', {})}", same),
    Rewriting("empty text beside a call", call("f", {}), blocks(lambda c: [{"type": "text", "text": ""}, *c])),
    Rewriting("text trimmed", f"  words  \n\n{call('f', {})}", blocks(stripped)),
    Rewriting("content as a string", "words", lambda turn: [{"role": "assistant", "content": "words"}]),
    Rewriting("cache marker", f"words\n{call('f', {})}", blocks(cached)),
    Rewriting("thinking dropped", f"{THINK}I do.\n{call('f', {})}", blocks(without("thinking"))),
    Rewriting("thinking dropped, no call", f"{THINK}I do.", blocks(without("thinking"))),
    Rewriting("thinking emptied", f"{THINK}I do.", blocks(emptied)),
    Rewriting("thinking unsigned", f"{THINK}I do.\n{call('f', {})}", blocks(unsigned)),
    Rewriting("only thinking kept and a call", f"{THINK}{call('f', {})}", same),
    Rewriting("results in completion order", TWO, same, reverse_results=True),
    Rewriting("ids of its own", TWO, foreign_ids),
    # opencode
    Rewriting("compact arguments", call("f", '{"b": 5000.0, "a": 1.50}'), arguments('{"b":5000,"a":1.5}'), "chat"),
    Rewriting("no content", call("f", {}), message(content=""), "chat"),
    Rewriting("empty arguments", call("f", {}), arguments(""), "chat"),
    Rewriting("results in completion order", TWO, same, "chat", reverse_results=True),
    # Qwen Code
    Rewriting("reasoning trimmed", f"{THINK}I do.\n{call('f', {})}", trimmed, "chat"),
    Rewriting("reasoning trimmed, no call", f"{THINK}I do.", trimmed, "chat"),
    Rewriting("reasoning dropped", f"{THINK}I do.", message(reasoning_content=None), "chat"),
    Rewriting("text as blocks", "words", message(content=[{"type": "text", "text": "words"}]), "chat"),
    # mini-swe-agent
    Rewriting("arguments kept", call("f", '{ "b":   1.0 }'), arguments('{ "b":   1.0 }'), "chat"),
    Rewriting(
        "reasoning by its other name", f"{THINK}I do.", message(reasoning_content=None, reasoning=" why "), "chat"
    ),
    # Codex
    Rewriting("nothing", f"{THINK}I do.\n{call('f', {'x': 1.0})}", same, "responses"),
    Rewriting("reasoning dropped", f"{THINK}I do.\n{call('f', {})}", lambda t: t[1:], "responses"),
    Rewriting(
        "no encrypted content",
        f"{THINK}I do.",
        lambda t: [{**t[0], "encrypted_content": None}, *t[1:]],
        "responses",
    ),
    Rewriting("ids dropped", f"I do.\n{call('f', {})}", lambda t: [{**i, "id": None} for i in t], "responses"),
    Rewriting("results in completion order", TWO, same, "responses", reverse_results=True),
]  # fmt: skip


async def conversation(door: Door, dialect: str, said: list[str], steps) -> list[Entry]:
    """Hold a conversation of ``said`` turns; ``steps(turn, number)`` gives what the client keeps and adds."""
    client = CLIENTS[dialect]
    door.script.replies = list(said)
    entries = [client.says("go")]
    for number in range(len(said)):
        status, answer = await door.post(client.path, client.body(entries, TOOLS))
        assert status == 200, answer
        entries += steps(client.turn(answer), number)
    return entries


def append_only(door: Door) -> None:
    """One leaf, and every prompt starts with all that was recorded before it."""
    calls, tree = door.session.tree.calls(), door.session.tree
    assert len(tree.leaves()) == 1 and [c.meta.fork_reason for c in calls] == [None] * len(calls)
    requests = door.engines["a"].requests
    for earlier, later in zip(calls, requests[1:], strict=False):
        before = tree.rebuild(earlier.reply_node).ids.tolist()
        assert later.prompt_ids[: len(before)] == before


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("template", [CHATML, HISTORY_REWRITING], ids=["plain", "rewriting"])
@pytest.mark.parametrize("case", REWRITINGS, ids=[f"{r.dialect}: {r.name}" for r in REWRITINGS])
async def test_a_rewritten_turn_does_not_fork(tmp_path, case: Rewriting, template, restarts):
    client = CLIENTS[case.dialect]
    said = (
        case.said.removeprefix("<think>\n") if template is HISTORY_REWRITING and "<think>" in case.said else case.said
    )
    if template is HISTORY_REWRITING and "</think>" not in said:
        said = f"</think>\n\n{said}"  # the prompt opened the reasoning

    def steps(turn: list[Entry], number: int) -> list[Entry]:
        if restarts:
            door.restart()
        kept = copy.deepcopy(turn)
        if number == 0:
            kept = case.back(kept) or kept
        ids = client.calls(kept)
        results = [(name, f"r{i}") for i, name in enumerate(ids)]
        added = client.results(results[::-1] if case.reverse_results else results)
        return [*kept, *added, client.says(f"more {number}")]

    async with opened(tmp_path, template=template) as door:
        door.engine()
        done = "</think>\n\ndone" if template is HISTORY_REWRITING else "done"
        await conversation(door, case.dialect, [said, done, done], steps)
        append_only(door)
        assert len(door.session.tree.calls()) == 3


# -- what is edited ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """A third request that is not the second one continued; it shares the whole path of ``shares`` calls."""

    name: str
    edit: Callable[[Any, list[Entry]], Entry]
    reason: str | None
    shares: int
    dialects: tuple[str, ...] = tuple(CLIENTS)


def plain(client, entries: list[Entry]) -> Entry:
    return client.body(entries, TOOLS)


def retold(client, entries: list[Entry]) -> Entry:
    return client.body([client.says("something else"), *entries[1:]], TOOLS)


def first_turn(entries: list[Entry]) -> int:
    return next(i for i, entry in enumerate(entries) if entry.get("role") == "assistant")


def other_words(client, entries: list[Entry]) -> Entry:
    at = first_turn(entries)
    return client.body([*entries[:at], client.says("I said this", "assistant"), *entries[at + 1 :]], TOOLS)


def rewound(client, entries: list[Entry]) -> Entry:
    return client.body([*entries[:2], client.says("another question")], TOOLS)


def nudged(client, entries: list[Entry]) -> Entry:
    """The last turn vanishes, a text is added to what stood before it."""
    return client.body([*entries[:-2], client.says("[Your previous response had no visible output.]")], TOOLS)


EDITS = [
    Edit("other tools", lambda c, e: c.body(e, TOOLS[:2]), "new_root", 0),
    Edit("other system prompt", lambda c, e: c.body(e, TOOLS, system="T"), "new_root", 0),
    Edit("first message edited", retold, "history_edited", 0),
    Edit("a turn reworded", other_words, "history_edited", 0),
    Edit("rewound", rewound, "branch", 1),
    Edit("the last turn dropped", nudged, "history_edited", 1),
    Edit("asked again", lambda c, e: c.body(e[:-2], TOOLS), "retry", 1),
    Edit(
        "summary call", lambda c, e: c.body([*e[:2], c.says("CRITICAL: Respond with TEXT ONLY.")], TOOLS), "branch", 1
    ),
]


@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("case", EDITS, ids=[e.name for e in EDITS])
async def test_an_edited_history_forks_where_it_was_edited_and_says_why(tmp_path, case: Edit, dialect):
    client = CLIENTS[dialect]
    async with opened(tmp_path) as door:
        engine = door.engine()
        entries = await conversation(
            door, dialect, ["one", "two"], lambda turn, number: [*turn, client.says(f"more {number}")]
        )
        append_only(door)
        first, second = door.session.tree.calls()
        door.script.replies = ["three"]
        status, answer = await door.post(client.path, case.edit(client, entries))
        assert status == 200, answer
        third = door.session.tree.calls()[-1]
        assert third.meta.fork_reason == case.reason and len(door.session.tree.leaves()) == 2
        paths = [door.session.tree.rebuild(c.reply_node).ids.tolist() for c in (first, second)]
        prompt = engine.requests[-1].prompt_ids
        assert [prompt[: len(path)] == path for path in paths] == [case.shares > 0, case.shares > 1]
        assert door.session.tree.prompt_ids(third.attach).tolist() == prompt[: third.attach.depth]


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_an_empty_turn_that_vanishes_leaves_the_rest_as_it_was(tmp_path, dialect):
    """Claude Code drops a turn without visible output and adds a text to the last user message."""
    client = CLIENTS[dialect]
    async with opened(tmp_path) as door:
        engine = door.engine()

        def steps(turn: list[Entry], number: int) -> list[Entry]:
            nudge = client.says("[Your previous response had no visible output.]")
            return [[*turn, client.says("more")], [nudge], turn][number]

        await conversation(door, dialect, ["one", f"{THINK}", "three"], steps)
        one, empty, three = door.session.tree.calls()
        assert three.meta.fork_reason == "history_edited"
        path = door.session.tree.rebuild(one.reply_node).ids.tolist()
        assert engine.requests[2].prompt_ids[: len(path)] == path
        # the prompt before the empty turn is shared to its last word
        assert three.attach.depth >= len(path) and empty.reply_node in door.session.tree.leaves()


async def test_reminders_in_the_middle_and_their_two_styles(tmp_path):  # P02
    """Role-system entries stay where they are; a client that stops using them forks where it rewrote them."""
    client = CLIENTS["messages"]
    async with opened(tmp_path, template=HISTORY_REWRITING) as door:
        door.engine()
        door.script.default = "</think>\n\nok"

        def steps(turn: list[Entry], number: int) -> list[Entry]:
            ids = client.calls(turn)
            return [*turn, *client.results([(i, "r") for i in ids]), client.says(f"left {number}", "system")]

        replies = [f"</think>\n\n{call('f', {'n': n})}" for n in range(4)]
        entries = await conversation(door, "messages", replies, steps)
        append_only(door)
        old_style = [e for e in entries if e["role"] != "system"]
        old_style[0] = client.says("<system-reminder>\nleft\n</system-reminder>\ngo")
        status, _ = await door.post(client.path, client.body(old_style, TOOLS))
        assert status == 200
        assert door.session.tree.calls()[-1].meta.fork_reason == "history_edited"
