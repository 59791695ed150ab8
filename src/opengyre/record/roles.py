"""Whose voice a trajectory is: main agent, sub-agent, or the call that summarises one of them. From traffic alone.

A leaf has the role of the call that ends it. Each call is judged on two questions - is it a sub-agent's, does it
summarise - by the rule of the harness that sent it, recognised by its user agent; a structural rule answers for all
others. What a summary replaces, and what goes on after it, keep the role of their agent: a compacted history has
several main leaves. Small helper calls that a harness makes on the side (a title) are no part of the main history and
count as sub-agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from opengyre.record.tree import Tree
from opengyre.record.types import CallMeta, Role

# The request headers that rules read, lower-case; the proxy keeps at least these in ``CallMeta.headers``.
ROLE_HEADERS = frozenset(
    {"user-agent", "x-claude-code-agent-id", "x-parent-session-id", "x-codex-parent-thread-id", "x-openai-subagent"}
)

# A request to summarise names the deed and what it is done to; either word alone is an everyday task.
ASKS = re.compile(r"\b(summari[sz]|summary|compact|condense|hand-?off)", re.IGNORECASE)
OF_WHAT = re.compile(r"\b(conversation|history|context|session|progress|so far|transcript|work|done)\b", re.IGNORECASE)
BARE_ORDER = 3  # words; a longer text that names no conversation may well be a task about summaries

Override = Callable[[Tree, int], Role | None]


class Kind(NamedTuple):
    """What a call is."""

    sub: bool
    summary: bool


@dataclass(frozen=True, slots=True)
class Around:
    """What a rule sees besides the call: the main agent's first call, the call whose reply this one continues, and
    the kind of the call committed before it - the agent at work when a summary is asked for out of context."""

    main: CallMeta
    parent: CallMeta | None
    continued: bool
    before: Kind

    def alien(self, meta: CallMeta) -> bool:
        """True if the call has no tools though the main agent does: a helper call, or a summary out of context."""
        return not meta.tool_names and bool(self.main.tool_names)


def claude_code(meta: CallMeta, around: Around) -> Kind:
    """Sub-agents carry a header; the summary request is an extra last text (2.1.220)."""
    summary = meta.asked_tail.startswith("CRITICAL: Respond with TEXT ONLY.")
    return Kind("x-claude-code-agent-id" in meta.headers or around.alien(meta), summary)


def opencode(meta: CallMeta, around: Around) -> Kind:
    """Sub-agents name their parent session; the summary is its own agent without tools (1.18.33)."""
    summary = meta.system_head.startswith("You are a context summarization agent")
    return Kind("x-parent-session-id" in meta.headers or (around.alien(meta) and not summary), summary)


def codex(meta: CallMeta, around: Around) -> Kind:
    """Sub-agents name their parent thread; the summary request is a last user message, without tools (0.171.0)."""
    sub = "x-codex-parent-thread-id" in meta.headers or meta.headers.get("x-openai-subagent", "compact") != "compact"
    asks = meta.asked_tail.startswith("You are performing a CONTEXT CHECKPOINT COMPACTION")
    return Kind(sub, asks or around.alien(meta))


def qwen_code(meta: CallMeta, around: Around) -> Kind:
    """Sub-agents are told by their system prompt alone, and a summary by its own (0.15.10).

    Which agent a summary is of is not said; it is of the one whose call came before.
    """
    if meta.system_head.startswith("You are the component that summarizes internal"):
        return Kind(around.before.sub, True)
    return Kind(meta.system_head != around.main.system_head, False)


def generic(meta: CallMeta, around: Around) -> Kind:
    """Any harness: another system prompt or tool set is a sub-agent.

    A summary is asked for by a new last user text after something was sampled, and nobody continues it; or by a call of
    its own, without tools, whose system prompt says so.
    """
    asks = _asks(meta.asked_tail)
    if around.alien(meta) and (asks or _asks(meta.system_head)):
        own = meta.system_head == around.main.system_head
        return Kind(False if own else around.before.sub, True)
    new = around.parent is not None and around.parent.asked_tail != meta.asked_tail
    tools = set(meta.tool_names)
    sub = meta.system_head != around.main.system_head or (bool(tools) and tools != set(around.main.tool_names))
    return Kind(sub, asks and new and not around.continued)


# How each family's user agent starts.
FAMILIES: dict[str, Callable[[CallMeta, Around], Kind]] = {
    "claude-cli/": claude_code,
    "opencode/": opencode,
    "codex": codex,
    "QwenCode/": qwen_code,
    "": generic,
}


def assign_roles(tree: Tree, override: Override | None = None) -> dict[int, Role]:
    """The role of each leaf.

    Args:
        tree: the finished tree of an execution.
        override: asked first, with the tree and a leaf; None leaves the leaf to the rules.
    """
    kinds = call_kinds(tree)
    roles = {}
    for leaf in tree.leaves():
        role = override(tree, leaf) if override else None
        roles[leaf] = role or role_of(kinds[tree.call_of(leaf).index])
    return roles


def role_of(kind: Kind) -> Role:
    """The role of a leaf that a call of this kind ends."""
    if kind.sub:
        return Role.SUB_AGENT_SUMMARY if kind.summary else Role.SUB_AGENT
    return Role.MAIN_SUMMARY if kind.summary else Role.MAIN


def call_kinds(tree: Tree) -> list[Kind]:
    """What each call is, in the order of ``tree.calls()``."""
    calls = tree.calls()
    kinds: list[Kind] = []
    if not calls:
        return kinds
    main = next((c.meta for c in calls if c.meta.tool_names), calls[0].meta)  # a title call may come before it
    for call in calls:
        parent = tree.continues(call)
        continued = call.reply_node is not None and bool(tree.children(call.reply_node))
        around = Around(main, parent.meta if parent else None, continued, kinds[-1] if kinds else Kind(False, False))
        kinds.append(_rule(call.meta)(call.meta, around))
    return kinds


def _rule(meta: CallMeta) -> Callable[[CallMeta, Around], Kind]:
    agent = meta.headers.get("user-agent", "")
    return next(rule for start, rule in FAMILIES.items() if agent.startswith(start))


def _asks(text: str) -> bool:
    """True for a request to summarise what was said so far; a bare order can mean nothing else."""
    return bool(ASKS.search(text) and (OF_WHAT.search(text) or len(text.split()) <= BARE_ORDER))
