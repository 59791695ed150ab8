"""Sessions: pins, keys, the hold clock, counters that outlive their session."""

from __future__ import annotations

import pytest

from opengyre.config import SamplingConfig
from opengyre.errors import ConfigError
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.session import HoldClock, Sessions


class Begun:
    """A store that only remembers what began."""

    def __init__(self) -> None:
        self.executions: dict[str, dict] = {}

    def begin_execution(self, execution_id, meta):
        self.executions[execution_id] = meta

    def submit(self, *_):
        raise AssertionError("no call here")


def test_overlapping_holds_count_once():
    now = [0.0]
    clock = HoldClock(lambda: now[0])
    with clock.hold():
        now[0] = 1.0
        with clock.hold():
            now[0] = 3.0
        now[0] = 4.0
        assert clock.seconds == 4.0
    now[0] = 9.0
    assert clock.seconds == 4.0


def test_open_close_forget():
    store = Begun()
    sessions = Sessions(store, max_calls=2)
    sessions.base_url = "http://127.0.0.1:1"
    url, key = sessions.open("e-1", pins=SamplingConfig(), meta={"task": "t"})
    assert url == "http://127.0.0.1:1/x/e-1" and store.executions == {"e-1": {"task": "t"}}
    session = sessions.authorise("e-1", ["wrong", key])
    ended = []
    sessions.on_end(ended.append)
    session.admit(), session.admit()
    with pytest.raises(Refusal) as used_up:
        session.admit()
    assert used_up.value.status == 403
    sessions.close("e-1"), sessions.close("e-1")
    assert ended == [session]
    with pytest.raises(Refusal) as late:
        session.admit()
    assert late.value.status == 409
    session.counters.calls = 2
    sessions.forget("e-1"), sessions.forget("e-1")
    assert sessions.counters.calls == 2 and "e-1" not in sessions


@pytest.mark.parametrize("keys", [[], ["nope"], ["é"], [""]])
def test_foreign_keys_are_refused(keys):
    sessions = Sessions(Begun())
    sessions.open("e", pins={}, meta={})
    with pytest.raises(Refusal) as refused:
        sessions.authorise("e", keys)
    assert refused.value.status == 401


@pytest.mark.parametrize(
    "pins",
    [
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": 0.0},
        {"max_tokens": 0},
        {"n": 2},
        {"top_k": 5},
        SamplingConfig(temperature="hot"),  # type: ignore[arg-type]
    ],
)
def test_illegal_pins_fail_at_creation(pins):  # P20
    store = Begun()
    with pytest.raises(ConfigError, match="pins"):
        Sessions(store).open("e", pins=pins, meta={})
    assert store.executions == {}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä"])
def test_ids_that_are_no_path_segment(name):
    with pytest.raises(ConfigError, match="execution id"):
        Sessions(Begun()).open(name, pins={}, meta={})
