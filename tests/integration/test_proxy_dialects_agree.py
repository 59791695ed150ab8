"""One conversation through three formats: the same tokens are recorded, node by node, in trees of the same shape."""

from __future__ import annotations

import pytest

from door import Door, opened
from policies import CHATML, HISTORY_REWRITING
from wire import CLIENTS, Entry, call

TOOLS = ("read", "run", "write")
PNG = "data:image/png;base64,AA=="
IMAGES = {
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    "chat": {"type": "image_url", "image_url": {"url": PNG}},
    "responses": {"type": "input_image", "image_url": PNG},
}
TEXTS = {"messages": "text", "chat": "text", "responses": "input_text"}
REPLIES = (
    f"<think>\nfirst ä\n</think>\n\nTwo at once.\n{call('read', {'p': 'ä.py', 'n': 1.0})}\n{call('run', {})}",
    f"<think>\nsecond\n</think>\n\n{call('write', {'z': [1, {'y': None}], 'a': 'x  '})}",
    "plain\n\nwords",
    f"<think>\n\n</think>\n\nno such: {call('nothing', '[1')}",
    "<think>\nlast\n</think>\n\n",
)


def additions(dialect: str, number: int, turn: list[Entry]) -> list[Entry]:
    """What the client adds after turn ``number``: results out of order, reminders in the middle, blocks."""
    client = CLIENTS[dialect]
    ids = client.calls(turn)
    added = client.results([(name, f"result {i}") for i, name in enumerate(ids)][::-1])
    text = {"type": TEXTS[dialect], "text": f"and then {number}"}
    return [
        *added,
        *([client.says(f"reminder {number}", "system")] if number % 2 == 0 else []),
        *([{"role": "user", "content": [text, IMAGES[dialect]]}] if number > 1 else []),
    ]


async def hold(door: Door, dialect: str, replies: tuple[str, ...]) -> None:
    """The conversation, then one that goes another way after its first turn."""
    client = CLIENTS[dialect]
    door.script.replies = [*replies, "another way"]
    text = {"type": TEXTS[dialect], "text": "look"}
    entries: list[Entry] = [{"role": "user", "content": [text, IMAGES[dialect]]}]
    first: list[Entry] = []
    for number in range(len(replies)):
        turn = await ask(door, dialect, entries)
        entries = [*entries, *turn, *additions(dialect, number, turn)]
        first = first or entries
    await ask(door, dialect, [*first, client.says("no, another way")])


async def ask(door: Door, dialect: str, entries: list[Entry]) -> list[Entry]:
    client = CLIENTS[dialect]
    status, answer = await door.post(client.path, client.body(entries, TOOLS))
    assert status == 200, answer
    return client.turn(answer)


@pytest.mark.parametrize("template", [CHATML, HISTORY_REWRITING], ids=["plain", "rewriting"])
async def test_three_formats_record_the_same(tmp_path, template):
    replies = REPLIES if template is CHATML else tuple(r.removeprefix("<think>\n") for r in REPLIES)
    if template is HISTORY_REWRITING:
        replies = tuple(r if "</think>" in r else f"</think>\n\n{r}" for r in replies)
    shapes = {}
    for dialect in CLIENTS:
        (tmp_path / dialect).mkdir()
        async with opened(tmp_path / dialect, template=template) as door:
            door.engine()
            await hold(door, dialect, replies)
            tree = door.session.tree
            nodes = [(tree.node(i).parent, tree.node(i).start, tree.node(i).ids.tolist()) for i in range(1, len(tree))]
            calls = [(c.attach.depth, c.meta.fork_reason, c.prompt_tokens, c.sampled_tokens) for c in tree.calls()]
            stored = [door.store.messages("e", c.meta.call_id) for c in tree.calls()]
            shapes[dialect] = (nodes, calls, stored)
            assert [c.meta.fork_reason for c in tree.calls()] == [None] * len(replies) + ["history_edited"]
            assert door.session.counters.placeholders == 3 * 1 + 2 + 3 + 1  # each call counts those in its request
    assert shapes["messages"] == shapes["chat"] == shapes["responses"]
