"""Roles of leaves from traffic, per harness family and by structure; and the drawing that shows them."""

from __future__ import annotations

from typing import Any

import pytest

from opengyre.record.draw import draw_tree
from opengyre.record.roles import ROLE_HEADERS, assign_roles
from opengyre.record.types import Finish, Role
from record_making import Talk, chain

S, TASK = (100, 101), (110,)


def roles(talk: Talk) -> list[str]:
    return list(assign_roles(talk.tree).values())


class Agent:
    """One agent of a harness: what its requests carry, and its history."""

    def __init__(self, talk: Talk, system: str, tools: tuple[str, ...], asked: str, agent: str = "", **headers: str):
        named = {k.replace("_", "-"): v for k, v in headers.items()} | ({"user-agent": agent} if agent else {})
        assert set(named) <= ROLE_HEADERS
        self.about: dict[str, Any] = {"system_head": system, "tool_names": tools, "asked": asked, "asked_tail": asked}
        self.about["headers"] = named
        self.talk, self.tools = talk, (system, tools)
        self.history: list[tuple[int, ...]] = [tuple(system.encode()), tuple(asked.encode())]

    def turn(self, n: int = 1) -> Agent:
        for _ in range(n):
            answer = (1000 + len(self.talk.seen),)
            self.talk.say(self.history, answer, tools=self.tools, **self.about)
            self.history += [answer, (2000 + len(self.talk.seen),)]
        return self

    def aside(self, asked: str, cut: int | None = None, **about: Any) -> None:
        """A call that leaves the history as it is: what was said (up to ``cut``) plus one last text."""
        tools = (about.get("system_head", self.tools[0]), about.get("tool_names", self.tools[1]))
        history = [*self.history[:cut], tuple(asked.encode())]
        self.talk.say(history, (3000,), tools=tools, **{**self.about, "asked": asked, "asked_tail": asked, **about})

    def compacted(self, text: str) -> Agent:
        self.history = [self.history[0], tuple(text.encode())]
        self.about |= {"asked": text, "asked_tail": text}
        return self


def test_claude_code():
    talk, cli = Talk(), "claude-cli/2.1.220 (external, sdk-cli)"
    ask = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
    on = "This session is being continued from a previous conversation"
    title = Agent(talk, "You are Claude Code", (), "<session>do it</session>", cli)
    title.turn()
    main = Agent(talk, "You are an interactive agent", ("Agent", "Bash"), "Do a long thing", cli).turn(2)
    sub = Agent(talk, "You are an agent for Claude Code", ("Bash",), "SUBPROMPT", cli, x_claude_code_agent_id="a1")
    sub.turn(2)
    main.turn()
    sub.aside(ask)
    sub.compacted(on).turn()
    main.aside(ask, cut=-2)
    main.compacted(on).turn(2)
    # The sub-agent's history up to its summary is one path with it; main's summary was cut before main's last turn.
    assert roles(talk) == ["sub_agent", "main", "sub_agent_summary", "sub_agent", "main_summary", "main"]


def test_opencode():
    talk, cli, tools = Talk(), "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", ("bash", "task")
    Agent(talk, "You are a title generator. You output ONLY", (), "Generate a title", cli).turn()
    main = Agent(talk, "You are opencode, an interactive CLI tool", tools, "Write hi", cli).turn(2)
    Agent(talk, "You are opencode, an interactive CLI tool", tools[:1], "SUB", cli, x_parent_session_id="ses").turn(2)
    Agent(talk, "You are a context summarization agent.", (), "Here is the conversation so far:", cli).turn()
    main.compacted("What did we do so far?").turn()
    assert roles(talk) == ["sub_agent", "main", "sub_agent", "main_summary", "main"]


def test_codex():
    talk, cli, tools = Talk(), "codex_exec/0.171.0 (Debian 12.0.0; x86_64)", ("exec_command", "multi_agent_v1")
    ask = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"
    main = Agent(talk, "You are a coding agent running in the Codex CLI", tools, "Write hi", cli).turn(2)
    spawn = {"x_openai_subagent": "collab_spawn", "x_codex_parent_thread_id": "t0"}
    sub = Agent(talk, "You are a coding agent running in the Codex CLI", tools[:1], "SUB", cli, **spawn).turn(2)
    sub.aside(ask, tool_names=())
    main.aside(ask, tool_names=())
    main.compacted("Another language model started to solve this problem").turn()
    assert roles(talk) == ["main", "sub_agent", "sub_agent_summary", "main_summary", "main"]


def test_qwen_code():
    talk, cli, tools = Talk(), "QwenCode/0.15.10 (linux; x64)", ("agent", "shell")
    summary = "You are the component that summarizes internal chat history into a given structure."
    main = Agent(talk, "You are Qwen Code, an interactive CLI agent", tools, "Write hi", cli).turn(2)
    sub = Agent(talk, "You are a general-purpose agent.", tools[1:], "SUB", cli).turn(2)
    sub.aside("Generate the <state_snapshot>.", system_head=summary, tool_names=())
    sub.compacted("snapshot").turn()
    main.turn().aside("Generate the <state_snapshot>.", system_head=summary, tool_names=())
    main.compacted("snapshot").turn()
    ends = {talk.tree.call_of(leaf).index: role for leaf, role in assign_roles(talk.tree).items()}
    assert ends == {
        3: Role.SUB_AGENT, 4: Role.SUB_AGENT_SUMMARY, 5: Role.SUB_AGENT,
        6: Role.MAIN, 7: Role.MAIN_SUMMARY, 8: Role.MAIN,
    }  # fmt: skip


@pytest.mark.parametrize("order", ["Summarize the work so far.", "Summarize."])
def test_any_harness_by_structure(order):
    """The built-in harness among others: the summary request is a last text on the same system prompt and tools."""
    talk = Talk()
    main = Agent(talk, "You build things.", ("write", "run"), "Build a parser").turn(3)
    Agent(talk, "You are a helper.", ("run",), "Check the parser").turn(2)
    main.turn()
    main.aside(order, cut=-2)
    main.compacted("Build a parser\nSo far: half of it").turn(2)
    assert roles(talk) == ["sub_agent", "main", "main_summary", "main"]


def test_a_task_about_summaries_is_no_summary():
    talk = Talk()
    Agent(talk, "You write.", ("write",), "Summarize the history of the project in three lines.").turn(3)
    assert roles(talk) == ["main"]


def test_a_summary_that_is_talked_on_is_no_compaction():
    talk = Talk()
    main = Agent(talk, "You write.", ("write",), "Write it").turn(2)
    main.history.append(tuple(b"Please summarize the work so far."))
    main.about |= {"asked_tail": "Please summarize the work so far."}
    main.turn(2)
    assert roles(talk) == ["main"]


def test_a_summary_agent_of_its_own_in_an_unknown_harness():
    talk = Talk()
    Agent(talk, "You write.", ("write",), "Write it").turn(2)
    Agent(talk, "You summarize a conversation between an agent and a user.", (), "<conversation>").turn()
    assert roles(talk) == ["main", "main_summary"]


def test_roles_can_be_overridden_leaf_by_leaf():
    talk = Talk()
    Agent(talk, "You build.", ("run",), "Build").turn()
    Agent(talk, "You help.", ("run",), "Help").turn()
    first, second = talk.tree.leaves()
    told = assign_roles(talk.tree, lambda tree, leaf: Role.MAIN if leaf == second else None)
    assert told == {first: Role.MAIN, second: Role.MAIN}
    assert assign_roles(Talk().tree) == {}


def test_T04_in_any_harness_a_sub_agent_between_the_parents_turns():
    talk = Talk()
    a, b = Agent(talk, "X", ("t1",), "a"), Agent(talk, "Y", ("t2",), "b")
    for agent in (a, b, a, b, a):
        agent.turn()
    assert roles(talk) == ["sub_agent", "main"]


def test_the_drawing_says_what_happened():
    talk = Talk()
    main = Agent(talk, "You build.", ("run",), "Build").turn(2)
    talk.say(main.history, (7,), tools=main.tools, **{**main.about, "delivered": False, "finish": Finish.ABORTED})
    main.about["versions"] = (3, 4)
    main.turn(20)
    Agent(talk, "You help.", ("run",), "Help").turn()
    assert talk.tree.match(chain(main.history, main.tools)).fork_reason is None
    kept = talk.tree.calls()[3].reply_node
    assert kept is not None
    text = draw_tree(talk.tree, assign_roles(talk.tree), {(kept, "s0")}).splitlines()
    assert text[0].startswith("24 calls · leaves: 2 main, 1 sub_agent · ")
    assert text[3].startswith("  ├─ #2 @") and "aborted · not delivered · [main]" in text[3]
    assert "+0 prompt" in text[4] and text[4].endswith("v3 cell-0 · v4 cell-0 · fork: retry · ● s0")
    assert "  ⋮" in text and len(text) < 15
    assert text[-1].startswith("○ #23") and text[-1].endswith("fork: new_root · [sub_agent]")
    assert len(draw_tree(talk.tree, {}, every=True).splitlines()) == 25
