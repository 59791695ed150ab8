"""The trajectory tree: matching, forking, rebuilding."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from msgspec.structs import replace

from opengyre.errors import RecordError
from opengyre.record.call import CommittedCall, digest_ids
from opengyre.record.draw import check_tree
from opengyre.record.tree import ROOT, Tree
from opengyre.record.types import Finish
from record_making import Talk, chain, ids, meta, reply

SYSTEM, TASK, TOOL = (100, 101, 102), (110, 111), (120,)


def raw(tree: Tree, messages: list[tuple[int, ...]], answer: tuple[int, ...], name: str) -> int:
    """A call whose messages are their tokens, nothing around them."""
    keys = chain(messages)
    at = tree.match(keys)
    tail, marks = [], []
    for key, message in zip(keys[at.n_messages :], messages[at.n_messages :], strict=True):
        tail += message
        marks.append((key, len(tail)))
    prompt = [*tree.prompt_ids(at).tolist(), *tail]
    assert prompt == [t for m in messages for t in m]
    call = CommittedCall(
        at, ids(*tail), tuple(marks), (reply(answer),), chain([*messages, answer])[-1],
        meta(name, fork_reason=at.fork_reason), digest_ids(ids(*prompt)), digest_ids(ids(*answer)),
    )  # fmt: skip
    return tree.commit(call)[1]


def test_T01_the_longest_matching_path_wins():
    tree = Tree()
    raw(tree, [(11, 12)], (21,), "s0")
    leaf_1 = raw(tree, [(11, 12), (21,), (31,)], (41,), "s1")
    s2 = raw(tree, [(11, 12)], (21, 31, 41, 51), "s2")
    leaf_2 = raw(tree, [(11, 12), (21, 31, 41, 51), (61,)], (71,), "s3")
    assert tree.node(tree.node(leaf_2).parent).parent == s2  # step 3 extends the leaf of step 2
    assert tree.leaves() == [leaf_1, leaf_2]
    one, two = tree.rebuild(leaf_1), tree.rebuild(leaf_2)
    assert one.ids.tolist() == [11, 12, 21, 31, 41]
    assert two.ids.tolist() == [11, 12, 21, 31, 41, 51, 61, 71]
    assert one.ids[one.trainable].tolist() == [21, 41]
    assert two.ids[two.trainable].tolist() == [21, 31, 41, 51, 71]  # two samplings of one id are two samples
    assert tree.calls()[2].meta.fork_reason == "retry"


def test_T04_a_sub_agent_between_the_parents_turns():
    talk = Talk()
    a, b = [(1001,), (1002,)], [(2001,), (2002,)]
    for turn, (who, tools) in enumerate([(a, "t1"), (b, "t2"), (a, "t1"), (b, "t2"), (a, "t1")]):
        answer = (3000 + turn,)
        talk.say(who, answer, tools=tools)
        who += [answer, (4000 + turn,)]
    leaves = talk.tree.leaves()
    chains = [[n for n, _ in talk.tree.ancestors(leaf) if talk.tree.node(n).sampled] for leaf in leaves]
    assert sorted(map(len, chains)) == [2, 3]
    assert [c.meta.fork_reason for c in talk.tree.calls()] == [None, "new_root", None, None, None]
    (p1, c1), (p2, _) = talk.seen[0], talk.seen[2]
    assert p2[: len(p1) + len(c1)].tolist() == [*p1, *c1]


@pytest.mark.parametrize("thinking", [True, False])
def test_T05_append_only_talks_do_not_fork(thinking: bool):
    """Whatever a template does to old turns, equal messages continue the recorded ids."""
    talk, history = Talk(), [SYSTEM, TASK]
    for turn in range(5):
        answer = ((900, 901) if thinking else ()) + (500 + turn,)
        talk.say(history, answer)
        history += [answer, (600 + turn,)]
        if turn == 2:
            history.append((700,))
    assert len(talk.tree.leaves()) == 1
    assert [c.meta.fork_reason for c in talk.tree.calls()] == [None] * 5


def test_T06_stripped_reasoning_forks_and_both_branches_stay_trainable():
    talk = Talk()
    talk.say([SYSTEM, TASK], (900, 500))
    talk.say([SYSTEM, TASK, (500,), TOOL], (501,))  # the harness dropped 900 from its turn
    assert talk.tree.calls()[1].meta.fork_reason == "history_edited"
    first, second = (talk.tree.rebuild(leaf) for leaf in talk.tree.leaves())
    assert first.ids[first.trainable].tolist() == [900, 500, 1]
    assert second.ids[second.trainable].tolist() == [501, 1]


def test_T08_a_break_inside_a_prompt_branches_there():
    talk = Talk()
    long = tuple(range(1000, 2197))  # with END and GO the prompt has 1,199 tokens
    talk.say([long], (500,))
    broken = (*long[:900], 7, *long[901:])
    prompt, _ = talk.say([broken], (501,))
    node = talk.tree.node(prompt)
    assert (node.offset, node.start) == (900, 900)
    assert talk.tree.unique_tokens == 1199 + 2 + 299 + 2
    assert [bool(talk.tree.rebuild(leaf).trainable.any()) for leaf in talk.tree.leaves()] == [True, True]


def test_P13_P14_an_unusable_call_is_kept_and_never_trained():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500, 501), usable=False)
    talk.say([SYSTEM, TASK, (500, 501), TOOL], (502,))
    (leaf,) = talk.tree.leaves()
    path = talk.tree.rebuild(leaf)
    assert path.ids[path.trainable].tolist() == [502, 1]
    assert path.sampled.sum() == 5
    assert not (path.logprobs[path.sampled] == 0.0).any()


def test_P14_a_reply_without_ids_leaves_no_node():
    talk = Talk()
    prompt, end = talk.say([SYSTEM, TASK], (), usable=False)
    assert prompt == end and talk.tree.calls()[0].reply_node is None
    assert not talk.tree.rebuild(end).sampled.any()


def test_P19_a_lost_reply_stays_and_the_retry_goes_on():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500,))
    turn_2 = [SYSTEM, TASK, (500,), TOOL]
    talk.say(turn_2, (501,), delivered=False, finish=Finish.ABORTED)
    talk.say(turn_2, (502,))
    lost, kept = talk.tree.leaves()
    assert talk.tree.calls()[2].meta.fork_reason == "retry"
    assert not talk.tree.rebuild(lost).trainable[-2:].any()
    assert [s.trainable for _, _, _, s in talk.tree.path(lost) if s.sampled] == [True, False]
    assert talk.tree.rebuild(kept).trainable[-2:].all()
    assert talk.tree.node(lost).parent == talk.tree.node(kept).parent  # the whole prompt is shared
    assert [talk.tree.trainable(leaf) for leaf in (lost, kept)] == [False, True]


def test_an_undelivered_reply_the_harness_continues_was_seen_after_all():
    talk = Talk()
    _, first = talk.say([SYSTEM], (500,), delivered=False)
    assert not talk.tree.trainable(first)
    talk.say([SYSTEM, (500,), TOOL], (501,))
    assert talk.tree.trainable(first)


@pytest.mark.parametrize("before", [{}, {"delivered": False}, {"usable": False}])
def test_of_replies_of_equal_meaning_the_first_that_counts_has_the_key_the_others_are_found_by_their_call(before):
    talk, key = Talk(), chain([SYSTEM, (500,)])[-1]
    nodes = [talk.say([SYSTEM], (500,), **about)[1] for about in (before, {}, {}, {"delivered": False})]
    first = 1 if before else 0
    assert talk.tree.match([key]).node == nodes[first] and talk.tree.moved == first
    found = [talk.tree.match([talk.tree.own(key, [f"call-000{i}"])]).node for i in range(4)]
    assert found == nodes
    assert talk.tree.own(key, ["call-0009"]) == key


def test_a_reply_that_goes_on_keeps_its_key_though_it_was_not_delivered():
    talk = Talk()
    _, first = talk.say([SYSTEM], (500,), delivered=False)
    talk.say([SYSTEM, (500,), TOOL], (501,))
    talk.say([SYSTEM], (500,))
    assert talk.tree.match(chain([SYSTEM, (500,)])).node == first and not talk.tree.moved


def test_P28_ids_take_no_part_equal_meaning_is_one_node():
    """Two turns with the same reply (a parser that numbers calls from 0) are two nodes, matched by position."""
    talk, history = Talk(), [SYSTEM]
    for _ in range(3):
        talk.say(history, (500,))
        history += [(500,), TOOL]
    assert len(talk.tree.leaves()) == 1 and len(talk.tree) == 7


def test_N11_a_call_over_a_weights_update_keeps_its_version_spans():
    talk = Talk()
    _, leaf = talk.say([SYSTEM], tuple(range(300, 399)), versions=(3, 4))
    spans = [(s.version, a, b) for _, a, b, s in talk.tree.path(leaf) if s.sampled]
    assert spans == [(3, 0, 50), (4, 50, 100)]
    versions = talk.tree.rebuild(leaf).versions
    assert versions[versions >= 0].min() == 3


def test_fork_reasons():
    talk = Talk()
    assert talk.tree.match(chain([SYSTEM])).fork_reason is None
    talk.say([SYSTEM, TASK], (500,))
    talk.say([SYSTEM, TASK, (500,), TOOL], (501,))
    reason = {name: talk.tree.match(chain(m)).fork_reason for name, m in {
        "goes on": [SYSTEM, TASK, (500,), TOOL, (501,), TOOL],
        "retry": [SYSTEM, TASK],
        "branch": [SYSTEM, TASK, (500,), (999,)],
        "edited": [SYSTEM, TASK, (5,), TOOL],
        "new": [(9,)],
    }.items()}  # fmt: skip
    expected = {"goes on": None, "retry": "retry", "branch": "branch", "edited": "history_edited", "new": "new_root"}
    assert reason == expected


def test_after_compaction_the_system_prompt_is_shared_and_no_sampled_token_is():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500, 501))
    talk.say([SYSTEM, (110, 112), (500, 501)], (502,))  # the second message parts from TASK at its last token
    node = talk.tree.node(talk.tree.calls()[1].prompt_node)
    assert (node.parent, node.offset, node.ids.tolist()) == (1, 5, [112, 1, 500, 501, 1, 2])


def test_extend_is_what_commit_does_and_repeats_to_nothing():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500,))
    at, left = talk.tree.extend(talk.tree.match(chain([(5,)])), ids(*SYSTEM, 1, 110, 9))
    assert (at.depth, left.tolist(), at.n_messages) == (5, [9], 0)
    again, left = talk.tree.extend(at, left)
    assert again == at and left.tolist() == [9]


def test_commits_prepared_at_once_share_and_are_exact_in_any_order():
    talk = Talk()
    a = talk.prepare([SYSTEM, TASK], (500,))
    b = talk.prepare([SYSTEM, TASK], (501,))
    c = talk.prepare([SYSTEM, TOOL], (502,))
    for call in (c, b, a):
        talk.tree.commit(call)
    assert len(talk.tree.leaves()) == 3
    assert talk.tree.unique_tokens == len(SYSTEM) + 1 + (1 + 1 + 1) + (2 + 1 + 1) + 3 * 2


def test_a_commit_that_contradicts_the_engine_is_refused_and_leaves_nothing():
    talk = Talk()
    talk.say([SYSTEM], (500,))
    good = talk.prepare([SYSTEM, (500,), TOOL], (501,))
    before = (len(talk.tree), talk.tree.unique_tokens, talk.tree.leaves())
    for change in (
        {"prompt_digest": digest_ids(ids(1))}, {"sampled_digest": digest_ids(ids(1))},
        {"attach": replace(good.attach, depth=1)}, {"attach": replace(good.attach, node=99)},
    ):  # fmt: skip
        fields = {n: getattr(good, n) for n in CommittedCall.__slots__} | change
        with pytest.raises(RecordError):
            talk.tree.commit(CommittedCall(**fields))
    assert (len(talk.tree), talk.tree.unique_tokens, talk.tree.leaves()) == before
    talk.tree.commit(good)
    with pytest.raises(RecordError, match="twice"):
        talk.tree.commit(good)


def test_committed_nodes_cannot_be_written_through_the_arrays_given():
    talk = Talk()
    call = talk.prepare([SYSTEM], (500,))
    _, leaf = talk.tree.commit(call)
    call.tail_ids[:] = 0
    call.sampled[0].ids[:] = 0
    assert talk.tree.rebuild(leaf).ids.tolist() == [*SYSTEM, 1, 2, 500, 1]
    with pytest.raises(ValueError):
        talk.tree.node(leaf).ids[0] = 3


def test_a_place_by_call_and_depth_is_the_place_by_node():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500,))
    talk.say([SYSTEM, TASK, (500,), TOOL], (501,))
    for n in range(5):
        at = talk.tree.match(chain([SYSTEM, TASK, (500,), TOOL, (501,)])[:n])
        assert talk.tree.at(at.via, at.depth, at.n_messages, at.fork_reason) == at
    assert talk.tree.at("", 0).node == ROOT
    for via, depth in (("nobody", 1), ("call-0000", 99)):
        with pytest.raises(RecordError):
            talk.tree.at(via, depth)


def test_a_reply_with_broken_parts_is_refused():
    good = Talk().prepare([SYSTEM], (500,))
    for change in ({"tail_ids": np.array([1.0])}, {"marks": ((b"", 4), (b"", 2))}, {"prompt_digest": b""}):
        with pytest.raises(RecordError):
            CommittedCall(**{n: getattr(good, n) for n in CommittedCall.__slots__} | change)


def test_a_place_between_two_nodes_has_one_name():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500,))
    prompt, reply_node = talk.say([SYSTEM, TASK, (500,), TOOL], (501,))
    start = talk.tree.node(prompt).start
    at = talk.tree.at("call-0001", start)
    assert (at.node, at.offset, at.via) == (talk.tree.node(prompt).parent, 2, "call-0000")
    assert talk.tree.at("call-0001", talk.tree.node(reply_node).start).node == prompt
    assert talk.tree.at("call-0001", 0).node == ROOT


def test_tokens_are_never_shared_inside_a_reply():
    talk = Talk()
    talk.say([SYSTEM], (500, 501))
    inside = talk.tree.at("call-0000", 6)  # after the first sampled token
    at, left = talk.tree.extend(inside, ids(501, 1))
    assert at == inside and left.tolist() == [501, 1]


def test_threads_may_commit_on_one_place():
    talk = Talk()
    talk.say([SYSTEM, TASK], (500,))
    calls = [talk.prepare([SYSTEM, TASK, (500,), (600 + i % 4,)], (700 + i,)) for i in range(24)]
    threads = [threading.Thread(target=lambda c=c: [talk.tree.commit(x) for x in c]) for c in (calls[::2], calls[1::2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(talk.tree.calls()) == 25 and len(talk.tree.leaves()) == 24
    assert talk.tree.unique_tokens == 8 + 2 + 4 * 3 + 24 * 2 and check_tree(talk.tree) == []
