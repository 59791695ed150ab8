"""Unmodified Qwen Code through the proxy, over Chat Completions."""

from __future__ import annotations

import pytest

from client_parts import (
    FEW,
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
from player import Say, calls

needs("qwen_code")


def shell(command: str) -> Call:
    """Arguments in an order, and with a number, that the client will write differently."""
    return "run_shell_command", {"timeout": 50000.0, "is_background": False, "command": command}


KIT = Kit(
    "qwen_code",
    shell,
    summary=lambda ask: ask.system.startswith("You are the component that summarizes internal"),
    delegate=lambda prompt: ("agent", {"description": "d", "prompt": prompt, "subagent_type": "general-purpose"}),
)


async def test_a_history_that_only_grows_is_one_leaf_whatever_cells_do(tmp_path):
    extra = [
        calls(shell("printf 'STEP%s:' 4 # \u00e9\u2028\U0001f600 \\u0041 \"'")),
        calls(("nonsense", {"a": 1}), shell("printf 'STEP%s:' 5")),
        calls(("read_file", {"path": 1}), shell("printf 'STEP%s:' 6")),
        calls(("write_file", {"file_path": "w", "content": "a  \n\n"}), shell("printf 'STEP%s:' 7")),
    ]
    await grow(tmp_path, KIT, extra)


async def test_two_sub_agents(tmp_path):
    """Headless, it runs the calls of one turn one after the other, sub-agents too."""
    async with staged(tmp_path, "qwen_code", delegating(KIT, at_once=False), executions=FEW) as stage:
        played = await stage.run("Have both written.", wanted={"one": "one", "two": "two"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1, "sub_agent": 2}, played.draw()
    assert played.forks == {"new_root": 1, "history_edited": 1}, played.draw()  # the second begins as the first


@pytest.mark.parametrize("how", ["refused", "usage"])
async def test_compaction(tmp_path, how):
    refused = how == "refused"
    options = {"reply_tokens": 2000, "compact_share": 1.0 if refused else None}
    # Its prompt is 55,000 by the test tokenizer. It compacts by itself at 7 of 10, which are 66,500: like the refusal
    # after three steps. Of an output beyond 4,096 bytes it may lose the end: it stops reading when the command ends.
    context = 66_500 if refused else 95_000
    part = filling(KIT, 4, 3900)
    async with staged(tmp_path, "qwen_code", part, options=options, context=context, executions=FEW) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(4))
    check_compacted(played, 4, refused=refused, edits=int(refused))  # the call it repeats is not the one it keeps


async def test_a_turn_that_is_cut(tmp_path):
    part = lambda ask: Say("word " * 60 if "Output token limit hit" not in ask else KIT.end, role="main")  # noqa: E731
    options = {"reply_tokens": 50}
    async with staged(tmp_path, "qwen_code", part, options=options, executions=FEW) as stage:
        played = await stage.run("Write much.")
    assert played.result.exit_code == 0 and played.leaves == {"main": 1}, played.log[-3000:]
    assert [c.meta.finish for c in played.tree.calls()] == [Finish.LENGTH], played.draw()


async def test_a_session_that_is_closed_ends_the_client(tmp_path):
    async with staged(tmp_path, "qwen_code", lambda _: "") as stage:
        played = await close_in_mid_turn(stage, KIT)
    assert played.result.exit_code == 0 and "[API Error: " in played.log, played.log[-3000:]  # its code says nothing
    assert played.session.counters.refused <= 2
