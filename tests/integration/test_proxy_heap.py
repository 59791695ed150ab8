"""What calls leave in memory: nothing for the cycle collector to walk through, and nothing only it could free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from door import opened
from wire import CLIENTS, call

CALLS = 40


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_a_recorded_call_leaves_no_object_that_the_cycle_collector_knows(tmp_path, dialect):
    client = CLIENTS[dialect]
    async with opened(tmp_path) as door:
        door.engine(chunk=64)
        entries = [client.says("go")]

        async def play(calls: int) -> int:
            for n in range(calls):
                door.script.replies = [f"<think>\nwhy\n</think>\n\nI do.\n{call('f', {'x': n})}"]
                status, answer = await door.post(client.path, client.body(entries, ("f",)))
                assert status == 200
                turn = client.turn(answer)
                entries.extend([*turn, *client.results([(i, "r") for i in client.calls(turn)])])
            door.engines["a"].requests.clear()
            door.script._plans.clear()
            gc.collect()
            gc.collect()  # tuples are let go of when what they hold was
            own = set(map(id, _inside(entries)))  # the client's, which is this test
            return sum(_counts(o) for o in gc.get_objects() if id(o) not in own)

        before = await play(4)
        grown = await play(CALLS) - before
        assert grown < CALLS / 2, f"{grown / CALLS} objects a call"


def _counts(known: object) -> bool:
    """Ours, or a plain container; the HTTP server's timers come and go."""
    return type(known) in (tuple, list, dict) or str(type(known)).startswith("<class 'opengyre")


def _inside(value: Any) -> Iterator[Any]:
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _inside(part)


async def test_a_forgotten_session_is_freed_at_once(tmp_path):
    """By reference counts alone: what holds a history of megabytes must not wait for a walk."""
    client = CLIENTS["chat"]
    async with opened(tmp_path) as door:
        door.engine(chunk=64)
        url, key = door.sessions.open("x", pins={}, meta={})
        door.url, door.key, own = url, key, (door.url, door.key)
        entries = [client.says("go")]
        for n in range(3):
            status, answer = await door.post(client.path, client.body(entries))
            assert status == 200
            entries += [*client.turn(answer), client.says(f"more {n}")]
        assert (await door.post(client.path, {"messages": "none"}))[0] == 400
        session = door.sessions.get("x")
        freed = [weakref.ref(o) for o in (session, session.tree, session.history)]
        del session
        gc.collect()
        gc.disable()
        try:
            door.sessions.forget("x")
            door.url, door.key = own
            door.engines["a"].requests.clear()
            await door.post(client.path, client.body([client.says("another")]))  # what handlers of the last call held
            assert [ref() for ref in freed] == [None] * 3
        finally:
            gc.enable()
