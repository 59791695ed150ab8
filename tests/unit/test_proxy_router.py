"""The balancer: fills evenly, keeps sessions where they are, strands nobody."""

from __future__ import annotations

import asyncio

from engines import ScriptedEngine
from opengyre.proxy.router import Router


def engine(name: str) -> ScriptedEngine:
    return ScriptedEngine(name, None)  # type: ignore[arg-type]  never asked to generate


async def test_least_loaded_with_affinity():
    router = Router()
    for name in "ab":
        router.add(engine(name), 4)
    first = await router.acquire("s", "1")
    assert (await router.acquire("t", "2")).engine.name != first.engine.name
    first.release()
    assert (await router.acquire("s", "3")).engine is first.engine
    assert (await router.acquire("s", "4")).engine is first.engine
    assert sum(router.engines.values()) == 3


async def test_a_crowded_home_is_left():
    router = Router()
    router.add(engine("a"), 4)
    leases = [await router.acquire("s", str(i)) for i in range(3)]
    router.add(engine("b"), 4)
    assert (await router.acquire("s", "x")).engine.name == "b"
    assert {lease.engine.name for lease in leases} == {"a"}


async def test_the_line_is_served_in_order_by_release_and_add():
    router = Router()
    router.add(engine("a"), 1)
    held = await router.acquire("s", "1")
    waiting = [asyncio.create_task(router.acquire(f"s{i}", str(i))) for i in range(2, 5)]
    await asyncio.sleep(0)
    assert router.waiting == 3
    held.release()
    held.release()
    assert (await waiting[0]).engine.name == "a" and router.waiting == 2
    router.add(engine("b"), 2)
    assert {(await w).engine.name for w in waiting[1:]} == {"b"} and router.waiting == 0


async def test_removed_engines_get_nothing_and_drain():
    router = Router()
    changes = []
    router.on_change = lambda: changes.append(dict(router.engines))
    router.add(engine("a"), 2)
    lease = await router.acquire("s", "1")
    router.remove("a")
    router.remove("a")
    assert router.running("a") == {"1"} and router.engines == {}
    drained = asyncio.create_task(router.drained("a"))
    waiting = asyncio.create_task(router.acquire("s", "2"))
    await asyncio.sleep(0)
    assert not drained.done() and not waiting.done()
    lease.release(failed=True)
    await drained
    assert router.running("a") == frozenset()
    router.add(engine("b"), 1)
    assert (await waiting).engine.name == "b"
    assert changes[0] == {"a": 0} and {"b": 1} in changes


async def test_a_cancelled_waiter_leaves_no_lease():
    router = Router()
    waiting = asyncio.create_task(router.acquire("s", "1"))
    await asyncio.sleep(0)
    router.add(engine("a"), 1)  # given to it ...
    waiting.cancel()  # ... in the moment it goes
    await asyncio.wait({waiting})
    assert waiting.cancelled() and router.engines == {"a": 0} and router.waiting == 0


async def test_a_suspect_is_avoided_and_trusted_again():
    router = Router()
    router.add(engine("a"), 2)
    (await router.acquire("s", "1")).release(failed=True)
    router.add(engine("b"), 2)
    assert (await router.acquire("s", "2")).engine.name == "b"
    router.remove("b")
    assert (await router.acquire("s", "3")).engine.name == "a"
