"""Deltas released early are always a prefix of the turn that is recorded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opengyre.proxy.conversation import Text, Thinking
from opengyre.proxy.stream import StopWatch, TextStream
from policies import CHATML, HISTORY_REWRITING, renderer

CACHE = {t: renderer(t) for t in (CHATML, HISTORY_REWRITING)}
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "é", "😀", "<", "STOP", "ST", "<tool",
     '{"name": "f", "arguments": {}}']
)  # fmt: skip


def streamed(template: str, ids: list[int], stop: tuple[str, ...], step: int) -> dict[str, str]:
    stream, got = TextStream(CACHE[template], stop, None), {"thinking": "", "text": ""}
    for i in range(0, len(ids), step):
        for kind, text in stream.feed(ids[i : i + step]):
            got[kind] += text
    return got


@given(st.lists(PIECES, max_size=14), st.sampled_from([CHATML, HISTORY_REWRITING]), st.integers(1, 5), st.booleans())
@settings(max_examples=250, deadline=None)
def test_released_text_is_a_prefix_of_the_turn(pieces, template, step, stops):
    render, stop = CACHE[template], ("STOP",) if stops else ()
    ids = render.encode("".join(pieces)) + render.stop_token_ids
    turn = render.parse(ids, "stop", stop=stop)
    got = streamed(template, ids, stop, step)
    assert "".join(p.text for p in turn.parts if isinstance(p, Thinking)).startswith(got["thinking"])
    assert "".join(p.text for p in turn.parts if isinstance(p, Text)).startswith(got["text"])


def test_words_are_released_as_they_come():
    render = CACHE[CHATML]
    ids = render.encode(
        '<think>\nhm hm\n</think>\n\nso it is\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    assert streamed(CHATML, ids, (), 1) == {"thinking": "hm hm", "text": "so it is"}


@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_stop_string_is_noticed_where_it_ends(step):  # P09
    render = CACHE[CHATML]
    ids = render.encode("<think>STOPHERE</think>a b STOPHERE c")
    watch = StopWatch(render, ["STOPHERE"], None)
    at = next(n for n in range(step, len(ids) + step, step) if watch.hit(ids[:n], step))
    assert (
        "a b STOPHERE" in render.decode(ids[:at])
        and at - len(render.encode("<think>STOPHERE</think>a b STOPHERE")) < step
    )
    assert not StopWatch(render, [], None).hit(ids, len(ids))
