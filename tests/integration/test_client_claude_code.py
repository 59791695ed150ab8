"""Unmodified Claude Code through the proxy: tools, thinking, sub-agents, what goes wrong with tools, a second process.

A history that only grows is one leaf without a fork, whatever the client did to it on its way back.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import msgspec
import pytest

from clients import needs, staged
from opengyre.config import HarnessConfig
from opengyre.executions.harness.base import Launch, Limits
from opengyre.executions.harness.claude_code import ClaudeCode
from opengyre.executions.outcome import Outcome
from opengyre.executions.sandbox import bubblewrap
from opengyre.proxy import app
from player import Ask, Say, calls, thinks

needs("claude_code")

SANDBOX = "local" if bubblewrap.probe() else "bubblewrap"
BARE = {"bare": True}


def bash(command: str) -> tuple[str, dict[str, object]]:
    """Arguments in an order, and with a number, that the client will write differently."""
    return "Bash", {"timeout": 5000.0, "description": "run", "command": command}


def worker(ask: Ask) -> str:
    """Every way to call a tool, with arguments that the client rewrites."""
    script = [
        thinks("first look", calls(bash("ls"), text="I look.")),
        thinks("two at once", calls(bash("cat notes.md"), ("Read", {"file_path": "notes.md", "offset": "1"}))),
        calls(("Edit", {"new_string": "x = 2   \n", "old_string": "x = 1\n", "file_path": "notes.md"})),
        thinks(
            "both", calls(bash("cd . && printf 42 > answer"), bash("sleep 0.2; echo later"), text="\n\nNow write.\n")
        ),
    ]
    return script[ask.turns] if ask.turns < len(script) else "All done."


@pytest.mark.parametrize(
    ("options", "sandbox"),
    [
        (BARE, "local"),
        ({"bare": False}, SANDBOX),
        ({"bare": False, "model": "claude-opus-4-5"}, "local"),  # another prompt, reminders inside other messages
    ],
)
async def test_a_history_that_only_grows_is_one_leaf(tmp_path, options, sandbox):
    async with staged(tmp_path, "claude_code", worker, options=options, sandbox=sandbox) as stage:
        played = await stage.run("Write 42 into answer.", wanted={"answer": "42"}, files={"notes.md": "x = 1\n"})
    assert (played.result.outcome, played.result.exit_code, played.result.reward) == (Outcome.FINISHED, 0, 1.0)
    assert len(played.tree.calls()) == 5 and played.leaves == {"main": 1} and not played.forks, played.draw()
    last = stage.player.asked[-1]
    assert [text for role, text in last.messages if role == "assistant" and "two at once" in text]
    assert ('"Agent"' in last.tools) is not options["bare"]
    assert played.session.counters.joined == played.session.counters.refused == 0


async def test_what_it_asks_besides_leaves_no_trace(tmp_path, monkeypatch):
    """It has the tokens of a large file counted before it shows it; a limit of turns ends it in between."""
    counted = []
    count = app.count
    monkeypatch.setattr(app, "count", lambda *args, **more: counted.append(count(*args, **more)) or counted[-1])
    large = "".join(f"line {n} of a large file\n" for n in range(1800))

    def part(ask: Ask) -> str:
        turns = [calls(("Read", {"file_path": "large"})), calls(bash("echo 42 > answer"))]
        return turns[ask.turns] if ask.turns < len(turns) else "It may not say this."

    async with staged(tmp_path, "claude_code", part, options={**BARE, "max_turns": 2}) as stage:
        played = await stage.run("Read it.", files={"large": large}, wanted={"answer": "42"})
    assert len(counted) == 1 and counted[0] > len(large) / 2 and "line 500" in stage.player.asked[1].last
    assert (played.result.exit_code, played.result.reward) == (1, 1.0) and '"error_max_turns"' in played.log
    assert len(played.tree.calls()) == 2 and played.leaves == {"main": 1} and not played.forks, played.draw()


SUB = "You are an agent for Claude Code"


def delegate(prompt: str, *, background: bool) -> tuple[str, dict[str, object]]:
    return "Agent", {
        "description": "delegated",
        "prompt": prompt,
        "subagent_type": "general-purpose",
        "run_in_background": background,
    }


def errand(ask: Ask) -> Say:
    """A sub-agent: writes the file that its prompt names."""
    name = ask.task.rpartition("FILE ")[2].split()[0]
    text = calls(bash(f"echo {name} > {name}")) if ask.turns == 0 else f"{name} is written."
    return Say(text, role="sub_agent")


@pytest.mark.parametrize("background", [False, True])
async def test_a_sub_agent_is_a_leaf_of_its_own(tmp_path, background):
    def part(ask: Ask) -> str | Say:
        if SUB in ask.system:
            return errand(ask)
        if ask.turns == 0:
            return calls(delegate("Please write FILE one .", background=background))
        return "All written." if "one is written." in ask else "I wait for it."

    async with staged(tmp_path, "claude_code", part) as stage:
        played = await stage.run("Have one written.", wanted={"one": "one"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    assert played.leaves == {"main": 1, "sub_agent": 1} and played.forks == {"new_root": 1}, played.draw()
    ends = [e for e in played.events if e["type"] == "result"]
    assert len(ends) == 1 + background and ends[-1]["result"] == "All written."


async def test_two_sub_agents_at_once(tmp_path):
    both = asyncio.Barrier(2)

    def part(ask: Ask) -> str | Say:
        if SUB in ask.system:
            said = errand(ask)
            said.trouble = [] if ask.turns else [(0, lambda _: both.wait())]
            return said
        if ask.turns == 0:
            return calls(delegate("Write FILE one .", background=False), delegate("Write FILE two .", background=False))
        return "Both written."

    async with staged(tmp_path, "claude_code", part) as stage:
        played = await stage.run("Have both written.", wanted={"one": "one", "two": "two"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    assert played.leaves == {"main": 1, "sub_agent": 2} and played.forks == {"new_root": 2}, played.draw()


async def test_a_sub_agent_that_is_sent_on(tmp_path):
    """SendMessage takes a sub-agent up again, with other tools: its history is another one from the start."""

    def part(ask: Ask) -> str | Say:
        if SUB in ask.system:
            if "FILE two" in ask.last:
                return Say(calls(bash("echo two > two")), role="sub_agent")
            more = "FILE two" in ask and ask.turns > 2
            return Say("two is written.", role="sub_agent") if more else errand(ask)
        if ask.turns == 0:
            return calls(delegate("Write FILE one .", background=False))
        if ask.turns == 1:
            agent = ask.last.partition("agentId: ")[2].split()[0]
            return calls(("SendMessage", {"to": agent, "message": "And FILE two .", "summary": "more"}))
        return "Both written." if "two is written." in ask else "I wait."

    async with staged(tmp_path, "claude_code", part) as stage:
        played = await stage.run("Have both written.", wanted={"one": "one", "two": "two"})
    assert (played.result.exit_code, played.result.reward) == (0, 1.0), played.draw()
    assert played.leaves == {"main": 1, "sub_agent": 2}, played.draw()


async def test_tools_that_fail_are_answers_like_others(tmp_path):
    """A command that fails, a tool that is not there, arguments that are wrong, a tool that is not allowed."""

    def part(ask: Ask) -> str:
        script = [
            calls(bash("exit 3")),
            calls(("Nonsense", {"a": 1})),
            calls(("Read", {"file": 1})),
            calls(bash("touch forbidden")),
            calls(("Bash", {"command": "echo ok", "description": "allowed"})),
            '<tool_call>\n{"name": "Bash", "arguments": {"command": \n</tool_call>',
        ]
        return script[ask.turns] if ask.turns < len(script) else "unreachable"

    options = {**BARE, "permission_mode": "dontAsk", "allowed_tools": ["Bash(echo *)", "Bash(exit *)"]}
    async with staged(tmp_path, "claude_code", part, options=options) as stage:
        played = await stage.run("Try.")
    assert played.result.exit_code == 0 and not (stage.root / "x1" / "workspace" / "forbidden").exists()
    assert len(played.tree.calls()) == 6 and played.leaves == {"main": 1} and not played.forks, played.draw()
    assert played.session.counters.malformed_calls == 1
    last = [e for e in played.events if e["type"] == "result"][-1]
    assert len(last["permission_denials"]) == 1


class Twice(ClaudeCode):
    """Two processes, one after the other: the second goes on with the first one's conversation."""

    def launch(self, *, base_url: str, key: str, instruction: str, workspace: Path, home: Path, model: str) -> Launch:
        first = super().launch(
            base_url=base_url, key=key, instruction=instruction, workspace=workspace, home=home, model=model
        )
        again = shlex.join([*first.argv, "--continue", "And now the second part."])
        return msgspec.structs.replace(
            first, argv=["/bin/sh", "-c", f"{shlex.join(first.argv)} && exec {again} </dev/null"]
        )


async def test_a_conversation_that_is_resumed_grows_on(tmp_path):
    def part(ask: Ask) -> str:
        if "second part" in ask.last:
            return thinks("second", calls(bash("echo 2 > second")))
        return thinks("first", calls(bash("echo 1 > first"))) if ask.turns == 0 else "Part done."

    async with staged(tmp_path, "claude_code", part, options=BARE) as stage:
        harness = Twice(HarnessConfig(kind="claude_code", options=BARE), Limits(stage.config.model.context))
        played = await stage.run("The first part.", wanted={"first": "1", "second": "2"}, harness=harness)
    assert (played.result.exit_code, played.result.reward) == (0, 1.0)
    assert len(played.tree.calls()) == 4 and played.leaves == {"main": 1} and not played.forks, played.draw()


async def test_a_turn_without_anything_to_see_is_dropped_by_the_client(tmp_path):
    """The client asks again as if the turn had not been: what was sampled stays a leaf, and is trained once."""

    def part(ask: Ask) -> str:
        return "Here." if "no visible output" in ask.last else thinks("nothing to say")

    async with staged(tmp_path, "claude_code", part, options=BARE) as stage:
        played = await stage.run("Say something.")
    assert played.result.exit_code == 0
    assert played.leaves == {"main": 2} and sum(played.forks.values()) == 1, played.draw()
