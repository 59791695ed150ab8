"""Properties of the tree under random traffic: turns, retries, edits, rewinds, compactions, sub-agents at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.record.call import digest_ids
from opengyre.record.draw import check_tree, draw_tree
from opengyre.record.roles import assign_roles
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from record_making import Talk

Message = tuple[int, ...]
words = st.lists(st.integers(10, 12), min_size=1, max_size=4).map(tuple)  # few words: equal pieces are the rule
MOVES = ("turn", "turn", "turn", "retry", "edit", "rewind", "compact", "sub_agent", "drop_reply")


class Harness:
    """Several conversations of one execution; each move changes one and says what is asked next."""

    def __init__(self) -> None:
        self.agents: list[list[Message]] = [[(100, 101), (10,)]]
        self.last: list[list[Message]] = [[]]

    def ask(self, move: str, which: int, word: Message, where: int) -> tuple[int, list[Message]]:
        which %= len(self.agents)
        history, last = self.agents[which], self.last[which]
        if move == "sub_agent":
            self.agents.append([(200 + where % 2, 201), word])
            self.last.append([])
            which = len(self.agents) - 1
        elif move == "retry" and last:
            history = last
        elif move == "edit":
            history[where % len(history)] = word
        elif move == "rewind":
            del history[1 + where % len(history) :]
        elif move == "compact":
            self.agents[which] = [history[0], (*word, 99)]
        elif move == "drop_reply" and len(history) > 2:
            del history[-2]
        asked = list(history if move == "retry" else self.agents[which])
        self.last[which] = asked
        return which, asked

    def hear(self, which: int, asked: list[Message], answer: Message, word: Message) -> None:
        self.agents[which] = [*asked, *([answer] if answer else []), word]


def run(draw: Callable, moves: int) -> Talk:
    """Random traffic; up to three calls are prepared before any of them is committed, in any order."""
    harness, talk, frozen = Harness(), Talk(), {}
    while len(talk.seen) < moves:
        waiting = []
        for _ in range(draw(st.integers(1, 3))):
            move, where, word = draw(st.sampled_from(MOVES)), draw(st.integers(0, 9)), draw(words)
            answer = draw(words | st.just(()))
            which, asked = harness.ask(move, draw(st.integers(0, 3)), word, where)
            versions = (where, where + 1) if where > 5 else (where,)
            about = {"delivered": draw(st.booleans()) or where > 3, "usable": where != 4, "versions": versions}
            waiting.append(talk.prepare(asked, answer, tools=asked[0][0], **about))
            harness.hear(which, asked, answer, word)
        for call in draw(st.permutations(waiting)):
            talk.tree.commit(call)
            frozen.update({n: contents(talk.tree, n) for n in range(len(frozen), len(talk.tree))})
        assert [contents(talk.tree, n) for n in frozen] == list(frozen.values())  # committed nodes never change
    return talk


def contents(tree: Tree, node: int) -> tuple[object, ...]:
    n = tree.node(node)
    return (n.parent, n.offset, n.start, n.ids.tobytes(), *(s.version for s in n.spans))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_trajectory_rebuilds_and_every_token_is_stored_once(data: st.DataObject):
    talk = run(data.draw, 14)
    tree = talk.tree
    names = {f"call-{i:04d}": seen for i, seen in enumerate(talk.seen)}
    for call in tree.calls():
        prompt, sampled = names[call.meta.call_id]
        end = call.prompt_node if call.reply_node is None else call.reply_node
        path = tree.rebuild(end)
        assert path.ids[: len(prompt)].tolist() == prompt.tolist()
        if call.reply_node is not None:
            assert path.ids[len(prompt) :].tolist() == sampled.tolist()
            own = path.nodes == call.reply_node
            assert own.sum() == len(sampled) and path.sampled[own].all()
            assert path.trainable[own].all() == tree.trainable(call.reply_node)
    assert check_tree(tree) == []
    on_paths: set[tuple[int, int]] = set()
    for leaf in tree.leaves():
        pieces = tree.path(leaf)
        path = tree.rebuild(leaf)
        assert np.concatenate([p.span.ids for p in pieces]).tolist() == path.ids.tolist()
        assert np.isnan(path.logprobs[~path.sampled]).all() and np.isfinite(path.logprobs[path.trainable]).all()
        assert ((path.versions >= 0) == path.sampled).all() and not (path.trainable & ~path.sampled).any()
        on_paths |= {(p.node, i) for p in pieces for i in range(p.start, p.stop)}
    assert len(on_paths) == tree.unique_tokens  # no stored token is on no path
    assert tree.unique_tokens <= sum(len(c.tail_ids) + sum(map(len, c.sampled)) for c in talk.made)
    assert sum(map(len, (s for _, s in talk.seen))) == sum(
        len(tree.node(n)) for n in range(len(tree)) if tree.node(n).sampled
    )
    assert draw_tree(tree, assign_roles(tree), every=True).count("\n") == len(talk.seen)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_no_two_prompts_at_one_place_begin_alike(data: st.DataObject):
    """So a tail has one way to go, and what can be shared is shared, whatever the order of commits."""
    tree = run(data.draw, 14).tree
    for node in range(len(tree)):
        heads = [
            (tree.node(c).offset, int(tree.node(c).ids[0])) for c in tree.children(node) if not tree.node(c).sampled
        ]
        assert len(heads) == len(set(heads))
        if not tree.node(node).sampled:
            own = tree.node(node).ids
            assert all(own[offset] != head for offset, head in heads if offset < len(own))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_stored_and_loaded_is_the_same_tree(data: st.DataObject):
    talk = run(data.draw, 10)
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "calls.db") as store:
        store.begin_execution("e", {})
        order = {c.meta.call_id: c for c in talk.made}
        for call in talk.tree.calls():
            store.put("e", order[call.meta.call_id])
        loaded = store.load_tree("e")
    assert [contents(loaded, n) for n in range(len(loaded))] == [contents(talk.tree, n) for n in range(len(talk.tree))]
    assert check_tree(loaded) == []


def test_check_tree_names_each_call_that_is_not_what_the_engine_saw():
    talk = Talk(Tree(verify=False))
    good = talk.prepare([(5,)], (6,))
    talk.tree.commit(good)
    talk.tree.commit(replace(talk.prepare([(5,), (6,), (7,)], (8,)), prompt_digest=digest_ids()))
    talk.tree.commit(replace(talk.prepare([(5,), (6,), (7,), (8,), (9,)], (3,)), sampled_digest=digest_ids()))
    talk.tree.commit(replace(talk.prepare([(4,)], ()), prompt_digest=digest_ids()))
    assert [line.split(":")[0] for line in check_tree(talk.tree)] == [
        "call call-0001",
        "call call-0002",
        "call call-0003",
    ]
