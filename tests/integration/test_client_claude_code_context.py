"""Unmodified Claude Code at the limits of its context and of its replies: compaction, of sub-agents too, and cut turns.

A compacted history is several leaves: what was said before, the summary, what follows; the tail that the client keeps
comes back as a prompt and is not trained again.
"""

from __future__ import annotations

import pytest

from clients import needs, staged
from opengyre.record.types import Finish
from player import Ask, Say, calls, thinks

needs("claude_code")

COMPACT = "CRITICAL: Respond with TEXT ONLY"  # how it begins to ask for a summary
STEPS = 6
WANTED = "\n".join(map(str, range(STEPS)))
CONTEXT = 48_000  # bare mode's prompt is 3k tokens of it and its request to summarise 6k, by the test tokenizer


def stepping(ask: Ask, who: str = "main") -> Say:
    """Work whose output fills the context: 12k tokens a step."""
    if COMPACT in ask.last:
        said = "<analysis>\nlooked back\n</analysis>\n<summary>\nSome steps are done; go on.\n</summary>"
        return Say(said, role=f"{who}_summary")
    step = max((n for n in range(STEPS) if f"STEP{n}:" in ask), default=-1) + 1
    if step == STEPS:
        return Say("All steps done.", role=who)
    fill = "head -c 12000 /dev/zero | tr '\\0' x"
    command = f"echo {step} >> steps; echo STEP{step}:; {fill}"
    return Say(thinks(f"step {step}", calls(("Bash", {"command": command, "description": "a step"}))), role=who)


@pytest.mark.parametrize("how", ["refused", "usage"])
async def test_compaction(tmp_path, how):
    options = {"bare": True, "reply_tokens": 1000, "compact_tokens": 0 if how == "refused" else CONTEXT}
    async with staged(tmp_path, "claude_code", stepping, options=options, context=CONTEXT) as stage:
        played = await stage.run("Do the steps.", wanted={"steps": WANTED})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    summaries = sum(COMPACT in ask.last for ask in stage.player.asked)
    assert summaries == played.leaves["main_summary"] >= 1, played.draw()
    assert played.leaves == {"main": summaries + 1, "main_summary": summaries}, played.draw()
    assert played.forks == {"history_edited": 2 * summaries}
    assert played.session.counters.refused == (summaries if how == "refused" else 0)
    assert len(played.tree.calls()) == STEPS + 1 + summaries
    after = [ask for ask in stage.player.asked if "being continued from a previous conversation" in ask.task]
    assert after and "Some steps are done" in after[0].task and after[0].turns > 0  # with the tail it kept


async def test_a_sub_agent_compacts_likewise(tmp_path):
    def part(ask: Ask) -> str | Say:
        if "You are an agent for Claude Code" in ask.system:
            return stepping(ask, "sub_agent")
        prompt = {"description": "steps", "prompt": "Do the steps.", "subagent_type": "general-purpose"}
        return "All done." if ask.turns else calls(("Agent", {**prompt, "run_in_background": False}))

    options = {"reply_tokens": 1000, "compact_tokens": 0}
    async with staged(tmp_path, "claude_code", part, options=options, context=112_000) as stage:
        played = await stage.run("Have the steps done.", wanted={"steps": WANTED})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    summaries = played.leaves["sub_agent_summary"]
    assert summaries >= 1, played.draw()
    assert played.leaves == {"main": 1, "sub_agent": summaries + 1, "sub_agent_summary": summaries}, played.draw()
    assert played.forks == {"new_root": 1, "history_edited": 2 * summaries}


async def test_a_turn_that_is_cut_is_gone_on_with(tmp_path):
    """A text and a tool call that are longer than a reply may be: both stay in the history, the call as text."""
    long = "word " * 60

    def part(ask: Ask) -> str:
        turns = [
            long,
            calls(("Write", {"file_path": "a", "content": long})),
            calls(("Bash", {"command": "echo 1 > a"})),
        ]
        return turns[ask.turns] if ask.turns < len(turns) else "Done."

    options = {"bare": True, "reply_tokens": 150}
    async with staged(tmp_path, "claude_code", part, options=options) as stage:
        played = await stage.run("Write much.", wanted={"a": "1"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.draw()
    assert played.leaves == {"main": 1} and not played.forks, played.draw()
    finishes = [c.meta.finish for c in played.tree.calls()]
    assert finishes == [Finish.LENGTH, Finish.LENGTH, Finish.STOP, Finish.STOP]
    assert played.session.counters.truncated == 2 and played.session.counters.malformed_calls == 1


async def test_turns_that_are_always_cut_end_the_run(tmp_path):
    async with staged(
        tmp_path, "claude_code", lambda _: "word " * 60, options={"bare": True, "reply_tokens": 50}
    ) as stage:
        played = await stage.run("Write much.")
    assert played.result.exit_code == 1
    assert played.leaves == {"main": 1} and len(played.tree.calls()) == 4 and not played.forks, played.draw()
