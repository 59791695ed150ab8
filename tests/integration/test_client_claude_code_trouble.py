"""Unmodified Claude Code while the cells behind the proxy die, switch roles, fall silent, or its execution ends.

Whatever happens behind the door, it sees its answer once, and the record says which cell and version said what.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from client_parts import switching
from clients import needs, staged
from engines import ScriptedEngine, until
from opengyre.executions.outcome import Outcome
from opengyre.record.types import Finish
from player import Ask, Say, calls, thinks

needs("claude_code")

BARE = {"bare": True}
SILENCE_S = 40.0  # longer than the 20 s after which the client shows a stall, with a keep-alive of 5 s
KEEPALIVE_S = 5.0


def bash(command: str) -> str:
    return calls(("Bash", {"command": command, "description": "run"}), text="One step more.")


@pytest.mark.parametrize("stream_tokens", [False, True])
async def test_engines_that_die_or_switch_roles_are_not_noticed(tmp_path, stream_tokens):
    def part(ask: Ask) -> Say:
        leave = switching(stage)
        trouble = [
            [(0, "dies")],  # before the turn
            [(5, "dies")],  # during it, and is there again at once
            [(7, leave), (7, "preempted")],  # its KV moves along
            [(7, leave), (7, "preempted_without_kv")],
            [(at, what) for at in (0, 9, 20, 30) for what in (leave, "dies" if at == 9 else "preempted")],
        ]
        if ask.turns == len(trouble):
            return Say("Done.")
        return Say(thinks(f"thought {ask.turns}", bash(f"echo {ask.turns} >> steps")), list(trouble[ask.turns]))

    async with staged(
        tmp_path, "claude_code", part, options=BARE, cells=2, keepalive_s=KEEPALIVE_S, stream_tokens=stream_tokens
    ) as stage:
        played = await stage.run("Five steps.", wanted={"steps": "0\n1\n2\n3\n4"})
        kv = [r.kv for e in stage.door.engines.values() for r in e.requests if r.kv is not None]
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    assert played.leaves == {"main": 1} and not played.forks, played.draw()
    tree, counters = played.tree, played.session.counters
    assert len(tree.calls()) == counters.calls == 6 and counters.joined == counters.refused == 0
    assert [c.meta.moves for c in tree.calls()] == [0, 1, 1, 1, 4, 0]  # one that dies without a word is no move
    pieces = [[(s.cell, s.version) for s in tree.node(c.reply_node).spans] for c in tree.calls()]
    assert [len(p) for p in pieces] == [1, 1, 2, 2, 4, 1], pieces
    assert all(cell != after for p in pieces for (cell, _), (after, _) in pairwise(p))
    assert len(kv) == 4 and all(k["from"] in "ab" for k in kv)


async def test_an_answer_that_waits_for_a_cell(tmp_path):
    """No cell serves when the call comes, and the only one leaves in the middle of the second turn."""

    async def leave(engine: ScriptedEngine) -> None:
        stage.door.router.remove(engine.name)
        left.set()

    left = asyncio.Event()

    def part(ask: Ask) -> Say:
        turns = [Say(bash("echo 1 > one")), Say(bash("echo 2 > two"), [(4, leave), (4, "preempted")]), Say("Done.")]
        return turns[ask.turns]

    async with staged(tmp_path, "claude_code", part, options=BARE, cells=0, keepalive_s=KEEPALIVE_S) as stage:
        running = asyncio.create_task(stage.run("Two steps.", wanted={"one": "1", "two": "2"}))
        await until(lambda: stage.door.router.waiting)
        stage.cell("a")
        await left.wait()
        await until(lambda: stage.door.router.waiting)
        stage.cell("b")
        played = await running
    assert (played.result.exit_code, played.result.reward) == (0, 1.0) and played.result.held_s > 0
    assert played.leaves == {"main": 1} and not played.forks and len(played.tree.calls()) == 3, played.draw()
    assert played.session.counters.joined == 0


async def test_long_silences_before_and_within_a_turn(tmp_path):
    """Three executions live through them side by side; nothing is asked for twice."""

    async def silence(_: ScriptedEngine) -> None:
        await asyncio.sleep(SILENCE_S)  # the client's own clocks are what is tested

    def part(ask: Ask) -> Say:
        if ask.turns:
            return Say("Done.")
        at = {"before": 0, "within": 6, "at the end": 30}[ask.task.rpartition("SILENCE ")[2].strip()]
        return Say(bash("echo 1 > one"), [(at, silence)])

    async with staged(tmp_path, "claude_code", part, options=BARE, keepalive_s=KEEPALIVE_S) as stage:
        where = ("before", "within", "at the end")
        all_played = await asyncio.gather(*(stage.run(f"SILENCE {w}", wanted={"one": "1"}) for w in where))
    for played in all_played:
        assert (played.result.exit_code, played.result.reward) == (0, 1.0)
        assert played.leaves == {"main": 1} and len(played.tree.calls()) == 2, played.draw()
        assert played.session.counters.joined == played.session.counters.undelivered == 0


async def test_connections_that_break(tmp_path):
    """The client asks again; what it never saw stays a leaf and is not trained."""

    async def cut(_: ScriptedEngine) -> None:
        for connection in stage.door.server._runner.server.connections:
            connection.transport.abort()

    def part(ask: Ask) -> Say:
        if ask.turns == 2:
            return Say("Done.")
        trouble = [(6, cut)] if ask.turns == 1 and not cuts else []
        cuts.extend(trouble)
        return Say(bash(f"echo {ask.turns} >> steps"), trouble)

    cuts: list[object] = []
    async with staged(tmp_path, "claude_code", part, options=BARE) as stage:
        played = await stage.run("Two steps.", wanted={"steps": "0\n1"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    joined = played.session.counters.joined  # 1 where the machine is so slow that the call still runs
    assert played.leaves == {"main": 2 - joined} and sum(played.forks.values()) == 1 - joined, played.draw()
    lost = [c for c in played.tree.calls() if not c.meta.delivered]
    assert len(lost) == played.session.counters.undelivered == 1 - joined
    assert not any(played.tree.trainable(c.reply_node) for c in lost)


async def test_the_deadline_scores_what_is_there_and_closes_the_door(tmp_path):
    hanging = asyncio.Event()

    async def hang(_: ScriptedEngine) -> None:
        hanging.set()
        await asyncio.Event().wait()

    def part(ask: Ask) -> Say:
        return Say(bash("echo 1 > one")) if ask.turns == 0 else Say(bash("echo 2 > two"), [(6, hang)])

    async with staged(tmp_path, "claude_code", part, options=BARE) as stage:
        played = await stage.run("Two steps.", wanted={"one": "1", "two": "2"}, agent_s=2.0, clock=hanging)
        assert played.result.outcome is Outcome.TIMED_OUT
        assert played.result.checks == {"one": 1.0, "two": 0.0}
        engine = stage.door.engines["a"]
        assert len(engine.aborted) == 1 and not engine.running
        *_, cut = played.tree.calls()
        assert cut.meta.finish is Finish.ABORTED and not cut.meta.delivered and cut.sampled_tokens == 6
        assert not played.tree.trainable(cut.reply_node)
        url = f"{stage.door.sessions.base_url}/x/x1/v1/messages"
        body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "late"}]}
        async with stage.door.http.post(url, json=body, headers={"x-api-key": played.session.key}) as late:
            assert late.status == 409 and late.headers["x-should-retry"] == "false"


async def test_a_session_that_is_closed_ends_the_client(tmp_path):
    """An execution that is over is told so once, and does not ask for minutes."""

    async def close(_: ScriptedEngine) -> None:
        stage.door.sessions.close("x1")
        await asyncio.Event().wait()

    def part(ask: Ask) -> Say:
        return Say(bash("echo 1 > one")) if ask.turns == 0 else Say(bash("echo 2 > two"), [(6, close)])

    async with staged(tmp_path, "claude_code", part, options=BARE) as stage:
        played = await stage.run("Two steps.", wanted={"one": "1"})
    assert (played.result.outcome, played.result.exit_code, played.result.reward) == (Outcome.FINISHED, 1, 1.0)
    assert played.session.counters.refused <= 2 and len(played.tree.calls()) == 2, played.draw()
