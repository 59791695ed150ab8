"""Cells come and go at random under a crowd of harnesses: nobody notices, and the record is exact.

SPEC §3.7 (role switches are invisible) and §3.3 (every trajectory rebuilds), with engines that preempt, die and refuse
at random token boundaries while they join and leave the balancer.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from door import Door, opened
from engines import logprob

EXECUTIONS, TURNS, CELLS = 6, 5, 4


async def harness(door: Door, n: int, url: str, key: str) -> None:
    """An agent that appends to its history, stream and non-stream in turn, and fails on any surprise."""
    messages: list[dict] = [{"role": "user", "content": f"task {n}"}]
    for turn in range(TURNS):
        body = {"model": "m", "max_tokens": 64, "messages": messages}
        async with door.http.post(f"{url}/v1/messages", json=body, headers={"x-api-key": key}) as response:
            assert response.status == 200
            answer = await response.json()
        assert answer["stop_reason"] == "end_turn"
        text = answer["content"][0]["text"]
        assert text == door.script.default
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]


async def weather(door: Door, seed: int, over: asyncio.Event) -> None:
    """Switch cells at random: leave the balancer, stop the calls, come back with the next version."""
    chance = random.Random(seed)
    version = 0
    while not over.is_set():
        engine = door.engines[chance.choice(sorted(door.engines))]
        door.router.remove(engine.name)
        engine.stop_after, engine.stop_as = chance.randrange(4), chance.choice(["preempted", "aborted", "dies"])
        engine.refuses = chance.random() < 0.3
        if chance.random() < 0.3:  # a cell that breaks without a word: it is still in the balancer
            door.router.add(engine, 4)
        for _ in range(chance.randrange(1, 6)):
            await asyncio.sleep(0)
        await door.router.drained(engine.name)
        version += 1
        engine.version, engine.stop_after, engine.refuses = version, None, False
        door.router.add(engine, 4)
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("seed", range(3))
async def test_no_harness_notices_and_every_path_rebuilds(tmp_path, seed):
    async with opened(tmp_path) as door:
        door.script.default = "a reply that takes a good many tokens to say"
        for n in range(CELLS):
            door.engine(f"cell{n}", slots=4)
        doors = {f"e{n}": door.sessions.open(f"e{n}", pins={}, meta={}) for n in range(EXECUTIONS)}
        over = asyncio.Event()
        switching = asyncio.create_task(weather(door, seed, over))
        await asyncio.gather(*(harness(door, n, *doors[f"e{n}"]) for n in range(EXECUTIONS)))
        over.set()
        await switching
        said = [*door.renderer.encode(door.script.default), *door.renderer.stop_token_ids]
        requests = {r.call_id: r for e in door.engines.values() for r in e.requests}
        moves = 0
        for execution in doors:
            tree = door.sessions.get(execution).tree
            assert len(tree.leaves()) == 1 and len(tree.calls()) == TURNS
            stored = door.store.load_tree(execution)
            for record in tree.calls():
                path = tree.rebuild(record.reply_node)
                prompt = requests[f"{record.meta.call_id}0000"].prompt_ids
                assert path.ids.tolist() == [*prompt, *said]
                reply = path.logprobs[len(prompt) :]
                np.testing.assert_allclose(reply, [logprob(i) for i in range(len(said))])
                assert stored.rebuild(record.reply_node).ids.tolist() == path.ids.tolist()
                moves += record.meta.moves
        assert moves > 0 and door.sessions.counters.moves == moves
        assert not any(e.running for e in door.engines.values()) and door.router.waiting == 0
