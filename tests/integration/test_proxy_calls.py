"""Calls through the whole proxy: recorded exactly, moved invisibly, ended cleanly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from door import events, opened
from engines import logprob, until
from opengyre.errors import ConfigError
from opengyre.proxy import app
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.lines import skeleton
from opengyre.proxy.reader import read
from opengyre.proxy.request import Asked, prepare
from opengyre.record.types import Finish
from policies import HISTORY_REWRITING

PATH = "/v1/messages"


def body(*texts: str, **options) -> dict:
    """A Messages body; odd texts are the assistant's."""
    messages = [{"role": "assistant" if i % 2 else "user", "content": t} for i, t in enumerate(texts)]
    return {"model": "policy-model", "max_tokens": 64, "messages": messages, **options}


def path_of(door, call: int):
    """The rebuilt path that ends with a call's reply."""
    record = door.session.tree.calls()[call]
    return door.session.tree.rebuild(record.reply_node), record


async def test_what_is_recorded_is_what_the_engine_saw_and_sampled(tmp_path):
    async with opened(tmp_path) as door:
        engine = door.engine(version=4)
        door.script.replies = ["international"]
        status, answer = await door.post(PATH, body("hi"))
        assert status == 200 and answer["content"] == [{"type": "text", "text": "international"}]
        assert answer["model"] == "policy-model" and answer["stop_reason"] == "end_turn"
        path, record = path_of(door, 0)
        sampled = [*door.renderer.encode("international"), *door.renderer.stop_token_ids]
        assert path.ids.tolist() == [*engine.requests[0].prompt_ids, *sampled]
        np.testing.assert_allclose(path.logprobs[path.sampled], [logprob(i) for i in range(len(sampled))])
        assert set(path.versions[path.sampled]) == {4} and path.trainable.sum() == len(sampled)
        assert record.meta.delivered and record.meta.finish is Finish.STOP and record.meta.cached_tokens == 3
        assert answer["usage"]["input_tokens"] == len(engine.requests[0].prompt_ids)
        assert answer["usage"]["output_tokens"] == len(sampled)
        again = door.store.load_tree("e").rebuild(record.reply_node)
        assert again.ids.tolist() == path.ids.tolist()


async def test_recorded_before_delivered(tmp_path, monkeypatch):
    async with opened(tmp_path) as door:
        door.engine()
        seen = []
        submit = door.store.submit

        def spy(*args):
            done = submit(*args)
            done.add_done_callback(lambda _: seen.append("durable"))
            return done

        monkeypatch.setattr(door.store, "submit", spy)
        async with door.request(PATH, body("hi", stream=True)) as response:
            async for line in response.content:
                if line.startswith(b"event: content_block_start"):
                    assert seen == ["durable"]
        assert seen == ["durable"]


async def test_a_call_that_cannot_be_recorded_is_not_delivered(tmp_path, monkeypatch):
    async with opened(tmp_path) as door:
        door.engine()

        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr(door.store, "submit", full)
        status, answer = await door.post(PATH, body("hi"))
        assert status == 529 and answer["error"]["type"] == "overloaded_error"
        got = await door.stream(PATH, body("hi"))
        assert [e["type"] for e in got] == ["message_start", "error"]
        assert len(door.session.tree) == 1


@pytest.mark.parametrize("end", ["preempted", "aborted", "dies"])
async def test_a_moved_call_is_one_message(tmp_path, end):  # X01
    async with opened(tmp_path) as door:
        a = door.engine("a", version=1)
        a.stop_after, a.stop_as = 5, end
        door.script.replies = ["a reply of many tokens"]
        a.gate.clear()
        call = asyncio.create_task(door.stream(PATH, body("hi")))
        await until(lambda: a.running)
        door.router.remove("a")
        a.gate.set()
        b = door.engine("b", version=2)
        got = await call
        text = "".join(e["delta"]["text"] for e in got if e["type"] == "content_block_delta")
        assert text == "a reply of many tokens" and got[-1]["type"] == "message_stop"
        assert not any(e["type"] == "error" for e in got)
        path, record = path_of(door, 0)
        spans = [p.span for p in door.session.tree.path(record.reply_node) if p.span.sampled]
        assert [(len(s), s.version, s.cell) for s in spans] == [(5, 1, "a"), (len(path.ids[path.sampled]) - 5, 2, "b")]
        assert b.requests[0].prompt_ids == [*a.requests[0].prompt_ids, *path.ids[path.sampled][:5].tolist()]
        assert b.requests[0].kv == (None if end == "dies" else {"from": "a"})
        assert record.meta.moves == 1 and door.session.counters.moves == 1
        np.testing.assert_allclose(path.logprobs[path.sampled], [logprob(i) for i in range(path.sampled.sum())])


async def test_no_request_is_stranded_by_a_switch(tmp_path):  # C01
    async with opened(tmp_path) as door:
        one, two = door.engine("one"), door.engine("two")
        one.gate.clear(), two.gate.clear()
        calls = [asyncio.create_task(door.post(PATH, body(f"q{i}"))) for i in range(8)]
        await until(lambda: len(one.running) + len(two.running) >= 8)
        door.router.remove("one")
        served = len(one.requests)
        one.refuses, one.stop_after = True, 0
        one.gate.set(), two.gate.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 8
        assert len(one.requests) == served and door.router.waiting == 0
        assert {r.meta.delivered for r in door.session.tree.calls()} == {True}


async def test_a_refusing_engine_is_left_at_once_and_found_again(tmp_path):
    async with opened(tmp_path) as door:
        a = door.engine("a")
        a.refuses = True
        call = asyncio.create_task(door.post(PATH, body("hi")))
        await until(lambda: len(a.requests) >= 2)  # alone, it is asked again after a moment
        door.engine("b")
        assert (await call)[0] == 200
        _, record = path_of(door, 0)
        assert record.meta.moves == 0 and door.sessions.held_s("e") > 0


async def test_held_time_is_counted_while_no_cell_serves(tmp_path):
    async with opened(tmp_path) as door:
        call = asyncio.create_task(door.post(PATH, body("hi")))
        await until(lambda: door.router.waiting)
        before = door.sessions.held_s("e")
        await until(lambda: door.sessions.held_s("e") > before)
        door.engine("a")
        assert (await call)[0] == 200
        after = door.sessions.held_s("e")
        await asyncio.sleep(0.02)
        assert door.sessions.held_s("e") == after


async def test_disconnect_aborts_the_engine_and_leaves_no_ghost(tmp_path):  # P22, P19
    async with opened(tmp_path) as door:
        a = door.engine("a")
        door.script.replies = ["first", "a long reply that nobody will read", "second"]
        _, answer = await door.post(PATH, body("hi"))
        a.stop_after = None
        history = ["hi", answer["content"][0]["text"], "go"]
        call = asyncio.create_task(door.stream(PATH, body(*history)))
        await a.until_sampled(a.tokens + 5)
        a.gate.clear()
        call.cancel()
        started = asyncio.get_running_loop().time()
        await until(lambda: not a.running)
        assert asyncio.get_running_loop().time() - started < 1.5
        await until(lambda: len(door.session.tree.calls()) == 2)
        a.gate.set()
        status, answer = await door.post(PATH, body(*history))
        assert status == 200 and answer["content"][0]["text"] == "second"
        assert a.requests[2].prompt_ids == a.requests[1].prompt_ids
        lost, kept = door.session.tree.calls()[1:]
        assert (lost.meta.delivered, lost.meta.finish, kept.meta.delivered) == (False, Finish.ABORTED, True)
        tree = door.session.tree
        assert not tree.trainable(lost.reply_node) and tree.trainable(kept.reply_node)
        assert sum(tree.trainable(leaf) for leaf in tree.leaves()) == 1
        status, _ = await door.post(PATH, body(*history, "second", "and"))
        assert a.requests[3].prompt_ids[: len(path_of(door, 2)[0].ids)] == path_of(door, 2)[0].ids.tolist()


async def test_a_resend_joins_the_running_call(tmp_path):  # P17
    async with opened(tmp_path) as door:
        a = door.engine("a")
        a.gate.clear()
        first = asyncio.create_task(door.stream(PATH, body("hi")))
        await until(lambda: a.running)
        first.cancel()
        second = asyncio.create_task(door.post(PATH, body("hi")))
        await until(lambda: door.session.counters.joined)
        a.gate.set()
        status, answer = await second
        assert status == 200 and answer["content"][0]["text"] == "ok"
        assert a.most_running == 1 and len(a.requests) == 1
        assert [r.meta.delivered for r in door.session.tree.calls()] == [True]


async def test_a_reply_lost_after_it_was_recorded_is_given_to_the_resend(tmp_path):
    async with opened(tmp_path) as door:
        a = door.engine("a")
        asked = Asked(Messages(), json.dumps(body("hi")).encode())
        prepared = prepare(door.renderer, door.session, asked, {})
        live = await door.driver.start(door.session, prepared)
        await live.result()
        door.driver.leave(live, answered=False)  # the connection broke while the answer was written
        await until(lambda: door.session.lost)
        status, answer = await door.post(PATH, body("hi"))
        assert status == 200 and answer["id"] == f"msg_{live.call_id}"
        assert len(a.requests) == 1 and not door.session.lost


async def test_keep_alive_while_the_engine_is_silent(tmp_path):  # P16
    async with opened(tmp_path, keepalive_s=0.02) as door:
        a = door.engine("a")
        door.script.replies = ["some words", "more"]
        a.gate.clear()
        async with door.request(PATH, body("hi", stream=True)) as response:
            raw = b""
            while raw.count(b"event: ping") < 3:  # before the first token
                raw += await response.content.readany()
            a.gate.set()
            raw += await response.content.read()
        got = events(raw)
        assert got[0]["type"] == "message_start" and got[-1]["type"] == "message_stop"
        path, _ = path_of(door, 0)
        assert door.renderer.decode(path.ids[path.sampled].tolist()) == "some words"
        a.gate.clear()
        async with door.request(PATH, body("there")) as response:  # not streamed: blanks before the JSON
            raw = b""
            while len(raw) < 3:
                raw += await response.content.readany()
            assert raw.strip() == b""
            a.gate.set()
            raw += await response.content.read()
        assert json.loads(raw)["content"][0]["text"] == "more"


async def test_pings_go_on_while_a_call_is_sampled_in_silence(tmp_path):  # P16
    async with opened(tmp_path, keepalive_s=0.02, stream_tokens=True) as door:
        door.engine("a").pace_s = 0.002
        door.script.replies = [f'<tool_call>\n{{"name": "write", "arguments": {{"text": "{"x" * 60}"}}}}\n</tool_call>']
        got = [e["type"] for e in await door.stream(PATH, body("hi", max_tokens=256))]
        assert got.count("ping") >= 3 and set(got[1 : got.index("content_block_start")]) == {"ping"}


async def test_a_clients_token_probe_is_not_trained(tmp_path):
    async with opened(tmp_path) as door:
        door.engine("a")
        assert (await door.post(PATH, body("hi", max_tokens=1)))[0] == 200
        path, record = path_of(door, 0)
        assert record.usable and path.sampled.sum() == 1 and not path.trainable.any()


async def test_an_ending_run_takes_no_more_calls(tmp_path):
    async with opened(tmp_path) as door:
        a = door.engine("a")
        call = asyncio.create_task(door.post(PATH, body("hi")))
        await a.until_sampled(1)
        a.gate.clear()
        await door.driver.stop()
        assert (await call)[0] in (200, 409) and not a.running and not door.session.live
        assert (await door.post(PATH, body("more")))[0] == 529
        assert len(door.session.tree.calls()) == 1


async def test_missing_logprobs_are_kept_and_not_trained(tmp_path):  # P13, P14
    async with opened(tmp_path) as door:
        a = door.engine("a", chunk=4)
        a.breaks_logprobs = True
        status, _ = await door.post(PATH, body("hi"))
        assert status == 200
        path, record = path_of(door, 0)
        assert not record.usable and not path.trainable.any()
        assert path.sampled.sum() == record.sampled_tokens == len(door.renderer.encode("ok")) + 1
        assert np.isnan(path.logprobs[path.sampled]).all()
        assert door.session.counters.token_id_gap == 1


async def test_context_overflow_in_words_the_client_acts_on(tmp_path):  # P08
    async with opened(tmp_path, context=1000) as door:
        a = door.engine("a")
        _, first = await door.post("/v1/messages/count_tokens", body("hi"))
        text = "\x01" * (900 - first["input_tokens"]) + "hi"
        status, answer = await door.post(PATH, body(text, max_tokens=200))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"] == ("input length and `max_tokens` exceed context limit: 900 + 200 > 1000")
        status, answer = await door.post(PATH, body("\x01" * 200 + text))
        assert status == 400 and "prompt is too long: 1100 tokens" in answer["error"]["message"]
        status, answer = await door.post("/v1/chat/completions", body("\x01" * 200 + text))
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert a.requests == [] and len(door.session.tree) == 1
        status, _ = await door.post(PATH, body(text, max_tokens=90))
        assert status == 200 and a.requests[0].max_new_tokens == 90


async def test_pins_win(tmp_path):  # P20
    async with opened(tmp_path, pins={"temperature": 0.7, "max_tokens": 20}) as door:
        a = door.engine("a")
        await door.post(PATH, body("hi", temperature=0, max_tokens=32000))
        assert (a.requests[0].temperature, a.requests[0].max_new_tokens) == (0.7, 20)
        assert path_of(door, 0)[1].meta.pins == {"temperature": 0.7, "max_new_tokens": 20.0}
        for bad in ({"temperature": "hot"}, {"n": 2}, {"messages": []}, {"top_p": 0.9}, {"temperature": 0.0}):
            with pytest.raises(ConfigError):
                door.sessions.open("f", pins=bad, meta={})


async def test_keys_prefixes_and_ends(tmp_path):
    async with opened(tmp_path, max_calls=1) as door:
        door.engine("a")
        wrong = {"Authorization": "Bearer nope"}
        async with door.http.post(f"{door.url}{PATH}", json=body("hi"), headers=wrong) as response:
            assert response.status == 401 and (await response.json())["error"]["type"] == "authentication_error"
        async with door.http.post(f"{door.url}x{PATH}", json=body("hi"), headers=wrong) as response:
            assert response.status == 404
        async with door.http.post(f"{door.url}{PATH}", json=body("hi"), headers={"x-api-key": door.key}) as response:
            assert response.status == 200
        assert (await door.post(PATH, body("again")))[0] == 403
        door.sessions.close("e")
        assert (await door.post(PATH, body("late")))[0] == 409
        assert door.sessions.calls("e") == 1
        door.sessions.forget("e")
        assert (await door.post(PATH, body("late")))[0] == 404
        assert door.sessions.counters.calls == 1 and "e" not in door.sessions


async def test_closing_a_session_ends_its_calls(tmp_path):
    async with opened(tmp_path) as door:
        a = door.engine("a")
        call = asyncio.create_task(door.post(PATH, body("hi")))
        stream = asyncio.create_task(door.stream(PATH, body("ho")))
        await a.until_sampled(2)
        a.gate.clear()
        door.sessions.close("e")
        await door.session.settled()
        assert len(door.session.tree.calls()) == 2 and not a.running
        status, _ = await call
        assert status in (200, 409)
        got = await stream
        assert got[-1]["type"] in ("error", "message_stop")
        assert not a.running and not door.session.live


async def test_a_port_in_use_is_a_config_error(tmp_path):
    async with opened(tmp_path) as door:
        port = int(door.sessions.base_url.rsplit(":", 1)[1])
        other = ProxyServer(door.sessions, door.driver)
        with pytest.raises(ConfigError, match=rf"{port} is in use"):
            await other.start("127.0.0.1", port)


async def test_system_entries_grow_one_path(tmp_path):  # P01, P02
    async with opened(tmp_path, template=HISTORY_REWRITING) as door:
        a = door.engine("a")
        call = '<tool_call>\n{"name": "read", "arguments": {"p": 1}}\n</tool_call>'
        door.script.replies = [f"</think>\n\n{call}"] * 11
        messages: list[dict] = [{"role": "user", "content": "go"}]
        tools = [{"name": "read", "input_schema": {"type": "object"}}]
        for k in range(10):
            status, answer = await door.post(PATH, {**body(), "messages": messages, "system": "S", "tools": tools})
            assert status == 200 and answer["stop_reason"] == "tool_use"
            messages.append({"role": "assistant", "content": answer["content"]})
            use = answer["content"][-1]["id"]
            result = {"type": "tool_result", "tool_use_id": use, "content": "ok"}
            messages.append({"role": "user", "content": [result]})
            messages.append({"role": "system", "content": f"<left>{5000 - k}</left>"})
        for k in range(9):
            before = path_of(door, k)[0].ids.tolist()
            assert a.requests[k + 1].prompt_ids[: len(before)] == before
        assert len(door.session.tree.leaves()) == 1
        assert {r.meta.fork_reason for r in door.session.tree.calls()} == {None}


async def test_sub_agent_turns_interleave(tmp_path):  # T04
    async with opened(tmp_path) as door:
        a = door.engine("a")
        histories: dict[str, list[str]] = {"X": ["main"], "Y": ["sub"]}
        for system in "XYXYX":
            history = histories[system]
            tools = [{"name": f"t{system}", "input_schema": {}}]
            _, answer = await door.post(PATH, body(*history, system=system, tools=tools))
            history += [answer["content"][0]["text"], "next"]
        assert len(door.session.tree.leaves()) == 2
        first = path_of(door, 0)[0].ids.tolist()
        assert a.requests[2].prompt_ids[: len(first)] == first
        assert path_of(door, 0)[1].meta.tool_names == ("tX",)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_history_that_grows_is_read_on_and_means_the_same(tmp_path, monkeypatch, path):
    """Prompts are token by token what one that never saw the session renders of recorded ids and new messages."""
    known = []

    def spy(*args):
        prepared = prepare(*args)
        known.append(prepared.request.known)
        return prepared

    monkeypatch.setattr(app, "prepare", spy)
    async with opened(tmp_path) as door:
        a = door.engine("a")
        history = ["go"]
        for k in range(6):
            door.script.replies = [f"reply {k}"]
            status, _ = await door.post(path, body(*history))
            assert status == 200
            history += [f"reply {k}", f"next {k}"]
        assert known == [0, 1, 3, 5, 7, 9]
        tree = door.session.tree
        assert len(tree.leaves()) == 1
        for request, record in zip(a.requests, tree.calls(), strict=True):
            assert request.prompt_ids == tree.rebuild(record.prompt_node).ids.tolist()
        # An edit in the middle is read from there, and forks there.
        history[4] = "changed"
        await door.post(path, body(*history))
        assert known[-1] == 4 and tree.calls()[-1].attach.n_messages == 4 and len(tree.leaves()) == 2
        whole = door.renderer.render_tail(Messages().parse(body(*history)), 4, tree.last_id(tree.calls()[-1].attach))
        assert a.requests[-1].prompt_ids[tree.calls()[-1].attach.depth :] == whole.ids


async def test_words_that_are_not_recorded_are_read_again(tmp_path):
    """A line may know more than the tree holds, when its call's keys were never committed here."""
    async with opened(tmp_path) as door:
        a = door.engine("a")
        long = [f"message {i}" for i in range(9)]
        first = read(Messages(), door.session.history, json.dumps(body(*long[:7])).encode())
        assert first.line is not None
        bare = tuple(map(skeleton, first.line.messages))
        door.sessions.lines.keep("e", replace(first.line, messages=bare))
        status, _ = await door.post(PATH, body(*long))
        assert status == 200
        assert a.requests[0].prompt_ids == door.renderer.render(Messages().parse(body(*long))).ids


async def test_lines_are_freed_with_their_session(tmp_path):
    async with opened(tmp_path) as door:
        door.engine("a")
        await door.post(PATH, body("hi"))
        assert len(door.sessions.lines) == 1
        door.sessions.close("e")
        assert len(door.sessions.lines) == 0
