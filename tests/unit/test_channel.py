"""The channel between conductor and cell: calls, events, errors, and a peer that dies."""

import asyncio
from pathlib import Path

import pytest

from opengyre.cells.channel import Channel
from opengyre.errors import CellError, EngineError, TrainingError


async def pair(tmp_path: Path, **callee: object) -> tuple[Channel, Channel, asyncio.AbstractServer]:
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Channel(reader, writer, peer="caller", **callee))  # type: ignore[arg-type]

    server = await asyncio.start_unix_server(accept, path=tmp_path / "s")
    caller = Channel(*await asyncio.open_unix_connection(tmp_path / "s"), peer="cell-1")
    return caller, await accepted, server


async def test_calls_overlap_and_answers_find_their_callers(tmp_path: Path) -> None:
    gates = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def on_call(op: str, args: dict) -> str:
        await gates[op].wait()
        return op + args["x"]

    caller, callee, server = await pair(tmp_path, on_call=on_call)
    first, second = asyncio.create_task(caller.call("a", x="1")), asyncio.create_task(caller.call("b", x="2"))
    await asyncio.sleep(0)
    gates["b"].set()
    assert await second == "b2" and not first.done()
    gates["a"].set()
    assert await first == "a1"
    await caller.close()
    await callee.closed.wait()
    server.close()


async def test_errors_keep_their_type_across_the_process_boundary(tmp_path: Path) -> None:
    async def on_call(op: str, args: dict) -> None:
        if op == "typed":
            raise TrainingError("loss is nan", where="micro-step 3")
        raise ZeroDivisionError("oops")

    caller, callee, server = await pair(tmp_path, on_call=on_call)
    with pytest.raises(TrainingError, match=r"cell-1: micro-step 3: loss is nan"):
        await caller.call("typed")
    with pytest.raises(CellError, match=r"ZeroDivisionError: oops"):
        await caller.call("untyped")
    await callee.close()
    await caller.close()
    server.close()


async def test_a_dead_peer_wakes_every_waiter_and_refuses_new_calls(tmp_path: Path) -> None:
    async def on_call(op: str, args: dict) -> None:
        await asyncio.Event().wait()

    caller, callee, server = await pair(tmp_path, on_call=on_call)
    waiting = [asyncio.create_task(caller.call("hang")) for _ in range(3)]
    await asyncio.sleep(0)
    await callee.close()
    for task in waiting:
        with pytest.raises(CellError, match="is gone"):
            await task
    with pytest.raises(CellError, match="cannot pull"):
        await caller.call("pull")
    caller.notify("exit")  # telling the dead is no error
    await caller.close()
    server.close()


async def test_events_arrive_in_order_and_a_late_answer_is_dropped(tmp_path: Path) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    def on_event(op: str, args: dict) -> None:
        seen.append(args["n"])
        if args["n"] == 99:
            done.set()

    release = asyncio.Event()

    async def on_call(op: str, args: dict) -> str:
        await release.wait()
        return "late"

    caller, callee, server = await pair(tmp_path, on_call=on_call, on_event=on_event)
    with pytest.raises(CellError, match="did not answer slow"):
        await caller.call("slow", timeout_s=0.01)
    release.set()
    for n in range(100):
        caller.notify("tick", n=n)
    await done.wait()
    assert seen == list(range(100))
    await callee.close()
    await caller.close()
    server.close()


def test_every_error_kind_can_cross() -> None:
    from opengyre.cells.channel import _rebuild

    assert isinstance(_rebuild("EngineError", "x", "c"), EngineError)
    assert isinstance(_rebuild("Unheard", "x", "c"), CellError)
