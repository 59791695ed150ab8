"""A trajectory tree for people: drawn as text, and checked against what the engine saw."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from opengyre.record.call import CallRecord, digest_ids, feed, new_digest
from opengyre.record.tree import Tree
from opengyre.record.types import Finish, Role

RUN_ENDS = 3  # calls shown at either end of a long run without a branch
Trained = Collection[tuple[int, str]]


def draw_tree(tree: Tree, roles: Mapping[int, Role], trained: Trained | None = None, *, every: bool = False) -> str:
    """The tree as text: one line a call under the call whose reply it continues, the longest way straight down.

    Each line says what the call adds to the tree (prompt and sampled tokens), where that leaves the path (``@depth``),
    the weights versions and cells that sampled it, and how it ended if not by stopping; leaves name their role. Long
    runs without a branch are shortened unless ``every``.

    Args:
        tree: any tree, also one still growing.
        roles: leaf to role, from ``assign_roles``.
        trained: (reply node, sample id) pairs; a trained reply is marked ``●`` with its samples.
    """
    marks = defaultdict(list)
    for node, sample in trained or ():
        marks[node].append(sample)
    calls, ways = tree.calls(), _ways(tree)
    lines = [_head(tree, roles)]
    stack = [(call, "○ ", "  ") for call in reversed(ways[-1])]
    while stack:
        first, lead, rest = stack.pop()
        run = [first]
        while len(ways[run[-1]]) == 1:
            run += ways[run[-1]]
        for index in _shown(run, every):
            text = "⋮" if index is None else _line(tree, calls[index], roles, marks)
            lines.append(lead + text)
            lead = rest
        if onward := ways[run[-1]]:
            stack.append((onward[-1], rest, rest))
            stack += [(side, rest + "├─ ", rest + "│  ") for side in reversed(onward[:-1])]
    return "\n".join(lines)


def check_tree(tree: Tree) -> list[str]:
    """Rebuild every path and compare each call on it with the digests of what the engine saw and sampled.

    It reads the arrays that training reads, not the hash states ``commit`` keeps.

    Returns:
        One line per difference; empty if the record is exact.
    """
    wrong: list[str] = []
    checked: set[int] = set()
    replies = {c.reply_node: c for c in tree.calls() if c.reply_node is not None}
    for leaf in tree.leaves():
        path = tree.rebuild(leaf)
        if not np.isfinite(path.logprobs[path.trainable]).all():
            wrong.append(f"leaf {leaf}: a trainable token has no finite log-probability")
        state, at = new_digest(), 0  # of the path so far: a call's prompt begins with the whole of the one before
        for node, _ in tree.ancestors(leaf):
            call = replies.get(node)
            if call is None:
                continue
            feed(state, path.ids[at : call.prompt_tokens])
            at = call.prompt_tokens
            if call.index not in checked:
                checked.add(call.index)
                wrong += _compare(call, state.digest(), digest_ids(path.ids[at : at + call.sampled_tokens]))
    for call in tree.calls():
        if call.index not in checked:  # nothing was sampled: no leaf need end where its prompt does
            prompt = tree.rebuild(call.prompt_node).ids[: call.prompt_tokens]
            wrong += _compare(call, digest_ids(prompt), digest_ids())
    return wrong


def _compare(call: CallRecord, prompt: bytes, sampled: bytes) -> list[str]:
    name, wrong = f"call {call.meta.call_id}", []
    if prompt != call.prompt_digest:
        wrong.append(f"{name}: the rebuilt prompt of {call.prompt_tokens} tokens is not what the engine saw")
    if sampled != call.sampled_digest:
        wrong.append(f"{name}: the rebuilt {call.sampled_tokens} sampled tokens are not what the engine sampled")
    return wrong


def _ways(tree: Tree) -> dict[int, list[int]]:
    """Call to the calls that continue its reply, the one that goes on longest last; -1: those that continue none."""
    calls = tree.calls()
    above = [parent.index if (parent := tree.continues(call)) else -1 for call in calls]
    ways: dict[int, list[int]] = {-1: [], **{call.index: [] for call in calls}}
    size = dict.fromkeys(ways, 1)
    for index in range(len(calls) - 1, -1, -1):  # a call comes after the one it continues
        size[above[index]] += size[index]
        ways[above[index]].insert(0, index)
        ways[index].sort(key=lambda way: (size[way], way))
    return ways


def _shown(run: list[int], every: bool) -> list[int | None]:
    """The calls of a run to be drawn; None stands for those left out, two at least."""
    if every or len(run) < 2 * RUN_ENDS + 2:
        return list(run)
    return [*run[:RUN_ENDS], None, *run[-RUN_ENDS:]]


def _head(tree: Tree, roles: Mapping[int, Role]) -> str:
    calls = tree.calls()
    sampled = sum(c.sampled_tokens for c in calls)
    read = sum(c.prompt_tokens for c in calls) + sampled
    count = Counter(role.value for role in roles.values())
    leaves = ", ".join(f"{count[r.value]} {r.value}" for r in Role if count[r.value])
    once = f"{tree.unique_tokens:,} tokens stored ({tree.unique_tokens - sampled:,} prompt, {sampled:,} sampled)"
    return f"{len(calls)} calls · leaves: {leaves or 'none'} · {once}, {read:,} seen by the engine"


def _line(tree: Tree, call: CallRecord, roles: Mapping[int, Role], marks: Mapping[int, list[str]]) -> str:
    prompt, reply = tree.node(call.prompt_node), call.reply_node
    own = len(prompt) if prompt.call == call.index else 0
    spans = tree.node(reply).spans if reply is not None else ()
    parts = [f"#{call.index} @{call.prompt_tokens - own:,} +{own:,} prompt +{call.sampled_tokens:,} sampled"]
    parts += dict.fromkeys(f"v{s.version} {s.cell}" for s in spans)  # each once, in order
    if call.meta.finish is not Finish.STOP:
        parts.append(call.meta.finish.value)
    if call.meta.fork_reason:
        parts.append(f"fork: {call.meta.fork_reason}")
    if not call.meta.delivered:
        parts.append("not delivered")
    if not call.usable:
        parts.append("unusable")
    end = call.prompt_node if reply is None else reply
    if end in roles and tree.call_of(end).index == call.index:
        parts.append(f"[{roles[end].value}]")
    if reply is not None and reply in marks:
        parts.append("● " + " ".join(sorted(marks[reply])))
    return " · ".join(parts)
