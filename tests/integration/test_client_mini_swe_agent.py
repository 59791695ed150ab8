"""Unmodified mini-swe-agent through the proxy: Chat Completions that are not streamed."""

from __future__ import annotations

from client_parts import FEW, Call, Kit, close_in_mid_turn, filling, grow, steps, wanted
from clients import needs, staged
from opengyre.executions.outcome import Outcome
from opengyre.record.types import Finish
from player import Ask, Say, calls

needs("mini_swe_agent")


def shell(command: str) -> Call:
    return "bash", {"n": 1.0, "command": command}


KIT = Kit("mini_swe_agent", shell, end=calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})))


async def test_a_history_that_only_grows_is_one_leaf_whatever_cells_do(tmp_path):
    extra = [calls(shell("printf 'STEP%s:' 4 # \u00e9\u2028\U0001f600 \\u0041 \"'"))]
    await grow(tmp_path, KIT, extra, "- Do the steps.")


async def test_turns_without_a_tool_call_are_dropped(tmp_path):
    """An error of the client's own takes their place, another one for a turn that was cut: they stay leaves."""

    def part(ask: Ask) -> Say:
        if "STEP0:" in ask:
            return Say(KIT.end, role="main")
        if "No tool calls found" in ask.last:
            return Say(KIT.step(0), role="main")
        return Say("I am done." if "reached the output token limit" in ask.last else "word " * 90, role="main")

    options = {"reply_tokens": 200}
    async with staged(tmp_path, "mini_swe_agent", part, options=options, executions=FEW) as stage:
        played = await stage.run("Do it.", wanted=wanted(1))
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 3} and played.forks == {"history_edited": 2}, played.draw()
    assert [c.meta.finish for c in played.tree.calls()] == [Finish.LENGTH, *[Finish.STOP] * 3]


async def test_a_prompt_that_is_refused_ends_it(tmp_path):
    part = filling(KIT, 9, 6000)
    async with staged(tmp_path, "mini_swe_agent", part, context=14_000, executions=FEW) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(2))
    assert (played.result.exit_code, played.result.reward) == (1, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1} and played.session.counters.refused == 1, played.draw()
    assert "ContextWindowExceededError" in played.log


async def test_calls_that_are_used_up_end_it(tmp_path):
    part = lambda ask: Say(KIT.step(steps(ask)), role="main")  # noqa: E731
    async with staged(tmp_path, "mini_swe_agent", part, options={"attempts": 2}, executions={"max_calls": 2}) as stage:
        played = await stage.run("Do the steps.", wanted=wanted(2))
    assert (played.result.exit_code, played.result.reward) == (1, 1.0), played.log[-3000:]
    assert played.leaves == {"main": 1} and played.session.counters.refused == 2, played.draw()


async def test_a_session_that_is_closed_ends_the_client(tmp_path):
    """Each of its attempts is told so; none is recorded."""
    async with staged(tmp_path, "mini_swe_agent", lambda _: "", options={"attempts": 2}) as stage:
        played = await close_in_mid_turn(stage, KIT)
    assert (played.result.outcome, played.result.exit_code) == (Outcome.FINISHED, 1), played.log[-3000:]
    assert "this execution has ended" in played.log
    *_, cut = played.tree.calls()
    assert cut.meta.finish is Finish.ABORTED and not played.tree.trainable(cut.reply_node), played.draw()
    assert played.session.counters.refused == 2  # the call that was cut, and the attempt after it: 409 both
