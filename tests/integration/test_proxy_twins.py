"""Conversations of one execution that are told the same: each goes on from its own tokens, by the ids we minted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from door import Door, opened
from opengyre.proxy import request
from opengyre.proxy.reader import read
from wire import CLIENTS, Entry, call

TOOLS = ("f",)
TURNS, CONVERSATIONS = 4, 4
each_dialect = pytest.mark.parametrize("dialect", CLIENTS)


@dataclass
class Twin:
    """One conversation: what its client keeps, and what its engine was given and sampled last."""

    name: str
    client: Any
    entries: list[Entry] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # prompt and reply of its last call
    ids: bool = True  # did that reply carry ids?
    turns: int = 0

    def keep(self, answer: Entry) -> None:
        turn = self.client.turn(answer)
        results = self.client.results([(name, "r") for name in self.client.calls(turn)])
        self.entries += [*turn, *results, self.client.says(f"more {self.turns}")]
        self.turns += 1


def written(door: Door, text: str, rng: random.Random) -> list[int]:
    """Ids of a text, as one of the many ways to cut it into tokens."""
    cut = rng.randrange(len(text))
    return [*door.renderer.encode(text[:cut]), *door.renderer.encode(text[cut:]), *door.renderer.stop_token_ids]


def logged(door: Door, answer: Entry) -> Any:
    """The call that an answer is of: all formats name it."""
    call_id = answer["id"].partition("_")[2] or answer["id"].partition("-")[2]
    return next(c for c in door.session.tree.calls() if c.meta.call_id == call_id)


async def turn(door: Door, twin: Twin, *, named: bool) -> Any:
    """One call of a conversation; returns its record."""
    headers = {"x-session-id": twin.name} if named else {}
    status, answer = await door.post(twin.client.path, twin.client.body(twin.entries, TOOLS), **headers)
    assert status == 200, answer
    record = logged(door, answer)
    tree = door.session.tree
    prompt = tree.rebuild(record.prompt_node).ids[: record.prompt_tokens].tolist()
    if twin.turns and twin.ids:
        assert prompt[: len(twin.path)] == twin.path, "its own tokens are the prefix"
    if twin.turns:
        assert record.meta.fork_reason in ((None,) if twin.ids else (None, "retry"))
    twin.path = tree.rebuild(record.reply_node).ids.tolist()
    twin.keep(answer)
    return record


@each_dialect
@pytest.mark.parametrize("seed", range(6))
async def test_each_conversation_goes_on_from_its_own_tokens(tmp_path, monkeypatch, dialect, seed):
    """In any order, at once or not, with restarts in between, whatever else was told the same."""
    rng, client = random.Random(f"{dialect} {seed}"), CLIENTS[dialect]
    at_once, restarts = seed % 2 == 1, seed % 3 == 2

    def both(reading: Any, history: Any, body: bytes, *known: Any) -> Any:
        whole, got = read(reading, history, body), read(reading, history, body, *known)
        assert got.keys == whole.keys  # reading on is reading everything
        return got

    monkeypatch.setattr(request, "read", both)
    async with opened(tmp_path) as door:
        engine = door.engine(slots=CONVERSATIONS)
        twins = [Twin(f"t{i}", client, [client.says("go")]) for i in range(CONVERSATIONS)]
        door.script.replies = [
            written(door, f"<think>\nwhy\n</think>\n\nI do.\n{call('f', {'x': [1, 2], 'y': 'word'})}", rng)
            for _ in range(TURNS * CONVERSATIONS)
        ]
        while going := [twin for twin in twins if twin.turns < TURNS]:
            some = rng.sample(going, rng.randint(1, len(going))) if at_once else [rng.choice(going)]
            await asyncio.gather(*(turn(door, twin, named=at_once) for twin in some))
            if restarts and rng.random() < 0.3:
                door.restart()
        tree = door.session.tree
        assert len(engine.requests) == len(tree.calls()) == TURNS * CONVERSATIONS
        assert len(tree.leaves()) == CONVERSATIONS and door.session.counters.joined == 0
        assert sorted(tree.rebuild(leaf).ids.tolist() for leaf in tree.leaves()) == sorted(t.path for t in twins)
        assert len({tuple(t.path) for t in twins}) > 1  # the same meaning, written in several ways


@each_dialect
@pytest.mark.parametrize("seed", range(4))
async def test_turns_without_ids_are_the_first_conversations(tmp_path, dialect, seed):
    """Words alone say nothing of whose they are: who says the same goes on as the first one did. Ids decide again."""
    rng, client = random.Random(f"words {dialect} {seed}"), CLIENTS[dialect]
    said = ["I will.", f"I do.\n{call('f', {'x': 1})}", "And now?", f"More.\n{call('f', {'x': 2})}"]
    async with opened(tmp_path) as door:
        door.engine()
        twins = [Twin(f"t{i}", client, [client.says("go")]) for i in range(3)]
        while going := [twin for twin in twins if twin.turns < len(said)]:
            twin = rng.choice(going)
            door.script.replies = [written(door, said[twin.turns], rng)]
            record = await turn(door, twin, named=False)
            twin.ids = "call" in said[twin.turns - 1]
            assert record.meta.fork_reason in (None, "retry") and record.usable
            if seed == 3 and rng.random() < 0.3:
                door.restart()
        tree = door.session.tree
        assert len(tree.calls()) == 12 and {c.attach.depth > 0 for c in tree.calls()[1:]} == {True}
        for twin in twins:  # what they were told last hangs below a whole path of replies, none encoded again
            leaf = next(leaf for leaf in tree.leaves() if tree.rebuild(leaf).ids.tolist() == twin.path)
            assert sum(tree.node(node).sampled for node, _ in tree.ancestors(leaf)) == len(said)
