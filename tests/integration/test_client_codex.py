"""Unmodified Codex through the proxy, over the Responses API."""

from __future__ import annotations

import re

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
from player import Ask, Say, calls, thinks

needs("codex")


def shell(command: str) -> Call:
    """Arguments in an order of their own; it reads them strictly, so numbers are integers."""
    return "exec_command", {"yield_time_ms": 20000, "cmd": command}


KIT = Kit(
    "codex",
    shell,
    summary=lambda ask: "CONTEXT CHECKPOINT COMPACTION" in ask.last,
    delegate=lambda prompt: ("multi_agent_v1.spawn_agent", {"message": prompt}),
)
AGENT = re.compile(r'"agent_id":\s*"([^"]+)"')


async def test_a_history_that_only_grows_is_one_leaf_whatever_cells_do(tmp_path):
    extra = [
        calls(("exec_command", {"cmd": "printf 'STEP%s:' 4 # \u00e9\u2028\U0001f600 \\u0041 \"'"})),
        calls(("nonsense", {"a": 1}), shell("printf 'STEP%s:' 5")),
        calls(("exec_command", {"cmd": 1}), shell("printf 'STEP%s:' 6")),
    ]
    await grow(tmp_path, KIT, extra)


async def test_a_free_text_tool_of_a_model_it_knows(tmp_path):
    """``apply_patch`` takes one text: to the policy it is the parameter ``input``."""
    patch = '*** Begin Patch\n*** Add File: note\n+hello \u00e9 "x"\n*** End Patch'

    def part(ask: Ask) -> Say:
        assert '"name": "apply_patch"' in ask.tools
        done = "Success" in ask.last
        return Say(KIT.end if done else thinks("patch", calls(("apply_patch", {"input": patch}))), role="main")

    async with staged(tmp_path, "codex", part, options={"model": "gpt-5.5"}, executions=FEW) as stage:
        played = await stage.run("Write a note.", wanted={"note": 'hello \u00e9 "x"'})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1} and not played.forks and len(played.tree.calls()) == 2, played.draw()


async def test_tools_that_the_policy_would_not_see_are_refused(tmp_path):
    """Newer models get their tools, which are JavaScript, inside the input."""
    options = {"model": "gpt-6-sol"}
    async with staged(tmp_path, "codex", lambda _: KIT.end, options=options, executions=FEW) as stage:
        played = await stage.run("Write.")
    assert played.result.exit_code == 1 and "tools belong into tools" in played.log
    assert not played.tree.calls() and played.session.counters.refused == 1


async def test_two_sub_agents_at_once(tmp_path):
    spawning = delegating(KIT)

    def part(ask: Ask) -> Say:
        agents = AGENT.findall(ask.last) or [a for _, text in ask.messages for a in AGENT.findall(text)]
        said = spawning(ask)
        if "spawn_agent" in said.text and agents:
            wait = ("multi_agent_v1.wait_agent", {"targets": agents, "timeout_ms": 60000})
            return Say(calls(wait), role="main")
        return said

    async with staged(tmp_path, "codex", part, executions=FEW) as stage:
        played = await stage.run("Have both written.", wanted={"one": "one", "two": "two"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1, "sub_agent": 2} and played.forks == {"new_root": 2}, played.draw()


async def test_compaction_by_usage(tmp_path):
    options = {"compact_tokens": 44_000}
    async with staged(
        tmp_path, "codex", filling(KIT, 5, 6000), options=options, context=60_000, executions=FEW
    ) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(5))
    check_compacted(played, 5, refused=False)


async def test_a_prompt_that_is_refused_ends_it(tmp_path):
    """One step leads from below the limit at which it compacts to beyond the context."""

    def part(ask: Ask) -> Say:
        return Say(calls(shell("head -c 9000 /dev/zero | tr '\\0' '~'"), shell("echo 0 > step0")), role="main")

    async with staged(
        tmp_path, "codex", part, options={"compact_tokens": 36_000}, context=40_000, executions=FEW
    ) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(1))
    assert (played.result.exit_code, played.result.reward) == (1, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1} and played.session.counters.refused == 1
    assert "ran out of room in the model's context window" in played.log


async def test_a_turn_that_is_cut_ends_it(tmp_path):
    async with staged(tmp_path, "codex", lambda _: "word " * 200, sampling={"max_tokens": 50}) as stage:
        played = await stage.run("Write much.")
    assert played.result.exit_code == 1 and "reason: max_output_tokens" in played.log
    assert played.leaves == {"main": 1} and len(played.tree.calls()) == 1, played.draw()


async def test_a_session_that_is_closed_ends_the_client(tmp_path):
    async with staged(tmp_path, "codex", lambda _: "") as stage:
        played = await close_in_mid_turn(stage, KIT)
    assert played.result.exit_code == 1 and played.session.counters.refused <= 2
