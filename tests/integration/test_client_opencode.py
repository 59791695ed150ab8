"""Unmodified opencode through the proxy, over both APIs it speaks."""

from __future__ import annotations

import pytest

from client_parts import (
    FEW,
    SANDBOX,
    Call,
    Kit,
    check_compacted,
    close_in_mid_turn,
    delegating,
    filling,
    grow,
    wanted,
)
from clients import needs, staged
from opengyre.record.types import Finish
from player import Ask, Say, calls

needs("opencode")


def shell(command: str) -> Call:
    """Arguments in an order, and with a number, that the client will write differently."""
    return "bash", {"timeout": 50000.0, "description": "run", "command": command}


KIT = Kit(
    "opencode",
    shell,
    summary=lambda ask: ask.system.startswith("You are a context summarization agent"),
    delegate=lambda prompt: ("task", {"description": "d", "prompt": prompt, "subagent_type": "general"}),
)


@pytest.mark.parametrize(("dialect", "sandbox"), [("chat", SANDBOX), ("messages", "local")])
async def test_a_history_that_only_grows_is_one_leaf_whatever_cells_do(tmp_path, dialect, sandbox):
    extra = [
        calls(("bash", {"command": "printf 'STEP%s:' 4 # \u00e9\u2028\U0001f600 \\u0041 \"'", "description": "d"})),
        calls(("nonsense", {"a": 1}), shell("printf 'STEP%s:' 5")),
        calls(("read", {"path": 1}), shell("printf 'STEP%s:' 6")),
        calls(("write", {"filePath": "w", "content": "a  \n\n"}), shell("printf 'STEP%s:' 7")),
    ]
    played = await grow(tmp_path, KIT, extra, options={"dialect": dialect}, sandbox=sandbox)
    assert {c.meta.dialect for c in played.tree.calls()} == {dialect}


async def test_two_sub_agents_at_once_after_a_title(tmp_path):
    play = delegating(KIT)

    def part(ask: Ask) -> Say:
        return Say("Two files", role="sub_agent") if "title generator" in ask.system else play(ask)

    async with staged(tmp_path, "opencode", part, options={"title": True}, executions=FEW) as stage:
        played = await stage.run("Have both written.", wanted={"one": "one", "two": "two"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1, "sub_agent": 3} and played.forks == {"new_root": 3}, played.draw()


@pytest.mark.parametrize("how", ["refused", "usage"])
async def test_compaction(tmp_path, how):
    dialect = "messages" if how == "refused" else "chat"
    options = {"reply_tokens": 2000, "dialect": dialect, "compact_tokens": None if how == "refused" else 38_000}
    part = filling(KIT, 4, 7000)
    async with staged(tmp_path, "opencode", part, options=options, context=46_000, executions=FEW) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(4))
    refused = how == "refused"
    check_compacted(played, 4, refused=refused, exit_code=int(refused))  # it counts the refusal as an error


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_a_turn_that_is_cut_ends_it(tmp_path, dialect):
    """It takes what there is for the last word."""
    options = {"reply_tokens": 50, "dialect": dialect}
    async with staged(tmp_path, "opencode", lambda _: "word " * 60, options=options, executions=FEW) as stage:
        played = await stage.run("Write much.")
    assert played.result.exit_code == 0 and played.leaves == {"main": 1}, played.log[-3000:]
    assert [c.meta.finish for c in played.tree.calls()] == [Finish.LENGTH], played.draw()


async def test_a_session_that_is_closed_ends_the_client(tmp_path):
    async with staged(tmp_path, "opencode", lambda _: "") as stage:
        played = await close_in_mid_turn(stage, KIT)
    assert played.result.exit_code == 1 and played.session.counters.refused <= 2, played.log[-3000:]
