"""The loop's other work goes on between two heavy pieces, however many wait."""

from __future__ import annotations

import asyncio

from opengyre.proxy.turns import Turns


async def test_other_work_runs_between_two_pieces():
    turns, log = Turns(), []

    async def heavy(name: int) -> None:
        await turns.take()
        log.append(name)

    def tick() -> None:
        log.append("tick")
        if len([x for x in log if x != "tick"]) < 5:
            asyncio.get_running_loop().call_soon(tick)

    asyncio.get_running_loop().call_soon(tick)
    await asyncio.gather(*(heavy(n) for n in range(5)))
    assert [x for x in log if x != "tick"] == [0, 1, 2, 3, 4]  # first come, first served
    between = [log[log.index(n) + 1 : log.index(n + 1)] for n in range(4)]
    assert all("tick" in ticks for ticks in between)


async def test_who_goes_away_gives_the_turn_on():
    turns, log = Turns(), []

    async def heavy(name: int) -> None:
        await turns.take()
        log.append(name)

    tasks = [asyncio.create_task(heavy(n)) for n in range(6)]
    await asyncio.sleep(0)
    tasks[1].cancel()  # stands in line
    await asyncio.sleep(0)
    for task in tasks[2:5]:
        task.cancel()  # one of them may have been given its turn just now
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log[0] == 0 and log[-1] == 5
    await asyncio.wait_for(turns.take(), 5)
