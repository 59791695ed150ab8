"""Prompt ids in one buffer: the same ids, in every form an engine takes them."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from opengyre.proxy.lines import Path
from opengyre.record.call import digest_ids
from opengyre.rollout.base import GenerateRequest
from opengyre.rollout.tokens import TokenIds, as_json, from_wire, to_wire

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@given(IDS)
def test_equal_to_the_list_of_the_same_ids(ids):
    made = TokenIds(np.array(ids, np.int32))
    assert made == ids and list(made) == ids and made[1:] == ids[1:] and len(made) == len(ids)
    assert made != [*ids, 1] and made == TokenIds(np.array(ids, np.int32))
    assert msgspec.json.decode(msgspec.json.encode({"input_ids": as_json(made)})) == {"input_ids": ids}
    assert msgspec.json.decode(bytes(as_json(ids))) == ids


@given(IDS)
def test_through_a_cells_channel(ids):
    request = GenerateRequest("c", "s", TokenIds(np.array(ids, np.int32)), 5, [1])
    plain = msgspec.to_builtins(request, enc_hook=to_wire, builtin_types=(bytes,))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    back = msgspec.convert(sent, GenerateRequest, dec_hook=from_wire, builtin_types=(bytes,))
    assert back.prompt_ids == ids and back == request


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=12))
def test_a_path_is_what_it_was_extended_by_whoever_else_goes_on_from_there(steps):
    """Paths fork anywhere and share their buffer; each keeps its own ids, digest and JSON."""
    paths = [(Path.of(np.empty(0, np.int32)), list[int]())]
    for number, (at, new, ask) in enumerate(steps):
        path, ids = paths[at % len(paths)]
        more = [100 * number + i for i in range(new)]
        paths.append((path.extended(np.array(more, np.int32)), ids + more))
        if ask:
            assert msgspec.json.decode(paths[-1][0].tokens.json()) == ids + more
    for path, ids in paths:
        assert path.tokens == ids and path.digest == digest_ids(np.array(ids, np.int32))
        assert msgspec.json.decode(path.tokens.json()) == ids
