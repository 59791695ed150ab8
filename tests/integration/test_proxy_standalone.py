"""``opengyre proxy`` as people run it: a process, real HTTP, real SDKs; servers with the wire of SGLang and vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from engine_servers import EngineServer, SglangServer, VllmServer, logprob
from engines import until
from opengyre.proxy.render import Renderer
from opengyre.quickstart import POLICY_DIR
from opengyre.record.draw import check_tree
from opengyre.record.store import Store

RENDERER = Renderer.load(POLICY_DIR)
ADMIN = "test-admin-key"
ASK = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "go"}]}


def says(text: str) -> list[int]:
    return [*RENDERER.encode(text), RENDERER.stop_token_ids[0]]


def server(kind: str, text: str = "I am here.", **options: Any) -> EngineServer:
    made = SglangServer if kind == "sglang" else VllmServer
    one = made(lambda prompt: says(text), context=2048, **options)
    one.encode = RENDERER.encode
    return one


@dataclass
class Proxy:
    """A proxy process, and its trainer's door."""

    url: str
    output: list[str]
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        async with self.http.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def open(self, **body: Any) -> dict[str, Any]:
        status, session = await self.ask("POST", "/sessions", body)
        assert status == 201, session
        return session

    async def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def proxy(folder: Path, *engines: EngineServer, args: tuple[str, ...] = ()):
    argv = [
        sys.executable,
        "-m",
        "opengyre",
        "proxy",
        "--model",
        "quickstart",
        "--dir",
        str(folder),
        "--poll",
        "0.2",
        *args,
    ]
    argv += [word for engine in engines for word in ("--engine", engine.url)]
    argv += [] if "--port" in args else ["--port", "0"]
    env = os.environ | {"OPENGYRE_ADMIN_KEY": ADMIN}
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    output: list[str] = []
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            output.append(line.decode().rstrip())
            if output[-1].startswith("proxy:") and not ready.done():
                ready.set_result(output[-1].split()[-1])
        if not ready.done():
            ready.set_exception(AssertionError("\n".join(output)))

    reading = asyncio.create_task(read())
    try:
        url = await asyncio.wait_for(ready, 120)
        async with aiohttp.ClientSession() as http:
            yield Proxy(url, output, process, http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


@asynccontextmanager
async def started(*servers: EngineServer):
    for one in servers:
        await one.start()
    try:
        yield
    finally:
        for one in servers:
            await one.stop()


def claude(session: dict[str, Any]) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=session["env"]["ANTHROPIC_BASE_URL"],
        auth_token=session["env"]["ANTHROPIC_AUTH_TOKEN"],
        api_key=None,
        max_retries=0,
    )


def gpt(session: dict[str, Any]) -> openai.AsyncOpenAI:
    env = session["env"]
    return openai.AsyncOpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], max_retries=0)


async def test_sdks_talk_and_the_trainer_gets_exact_samples(tmp_path):
    sglang, vllm = server("sglang"), server("vllm")
    sglang.version = vllm.version = "5"
    async with started(sglang, vllm), proxy(tmp_path / "r", sglang, vllm) as px:
        one, two = await px.open(query_id="q", task_id="t"), await px.open(query_id="q", task_id="t")
        async with claude(one) as sdk:
            first = await sdk.messages.create(**ASK)
            assert first.content[0].text == "I am here." and first.stop_reason == "end_turn"
            more = [
                *ASK["messages"],
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": "on"},
            ]
            async with sdk.messages.stream(**{**ASK, "messages": more}) as stream:
                assert (await stream.get_final_message()).content[0].text == "I am here."
        async with gpt(two) as sdk:
            chat = await sdk.chat.completions.create(**ASK)
            assert chat.choices[0].message.content == "I am here."
            reply = await sdk.responses.create(model="policy", input="go", max_output_tokens=64)
            assert reply.output_text == "I am here."
        status, refused = await px.ask("GET", f"/sessions/{one['execution_id']}/samples")
        assert status == 409 and "close it first" in refused["error"]["message"]
        for session, reward in ((one, 1.0), (two, 0.0)):
            status, closed = await px.ask("POST", f"/sessions/{session['execution_id']}/close", {"reward": reward})
            assert status == 200 and closed["state"] == "closed" and closed["outcome"] == "finished"
        _, answer = await px.ask("GET", f"/sessions/{one['execution_id']}/samples?messages=1")
        (sample,) = answer["samples"]
        reply_ids = says("I am here.")
        trained = [i for i, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m]
        assert trained == reply_ids * 2 and sample["role"] == "main" and sample["reward"] == 1.0
        assert [v for v in sample["logprobs"] if v is not None] == [logprob(n) for n in range(len(reply_ids))] * 2
        assert {s["version"] for s in sample["spans"] if s["sampled"]} == {5}
        assert [m["content"] for m in sample["messages"]] == ["go", "I am here.", "on", "I am here."]
        # the prompt the second call's server saw is the sample up to its last reply
        seen = max(
            (*sglang.requests, *vllm.requests), key=lambda r: len(r.get("input_ids") or r.get("token_ids") or ())
        )
        seen_ids = seen.get("input_ids") or seen.get("token_ids")
        assert sample["input_ids"][: len(seen_ids)] == seen_ids
        status, gone = await px.ask("DELETE", f"/sessions/{one['execution_id']}")
        assert status == 200 and gone == {"execution_id": one["execution_id"]}
        assert (await px.ask("GET", f"/sessions/{one['execution_id']}/samples?messages=1"))[1] == answer
        _, tree = await px.ask("GET", f"/sessions/{two['execution_id']}/tree")
        assert tree["reward"] == 0.0 and len(tree["calls"]) == 2
        assert await px.end() == 0
    with Store.open(tmp_path / "r" / "calls.db", readonly=True) as store:
        for stored in store.executions():
            assert not list(check_tree(store.load_tree(stored.execution_id, verify=False)))
            assert stored.outcome is not None


async def test_a_server_that_dies_in_a_call_is_left_and_the_call_goes_on(tmp_path):  # SPEC §3.7
    text = "One two three four five six."
    good, bad = server("sglang", text), server("sglang", text)
    whole = says(text)
    prompt_tokens: list[int] = []

    def goes_on(prompt: list[int]) -> list[int]:
        prompt_tokens.append(len(prompt))
        return whole[len(prompt) - prompt_tokens[0] :]

    good.say = bad.say = goes_on
    async with started(good, bad), proxy(tmp_path / "r", good, bad) as px:
        session = await px.open()
        bad.die_after = good.die_after = 3  # whichever is asked first

        async def survive() -> None:
            await until(lambda: good.deaths + bad.deaths)
            good.die_after = bad.die_after = None

        async with claude(session) as sdk:
            message, _ = await asyncio.gather(sdk.messages.create(**ASK), survive())
        assert message.content[0].text == text
        _, shown = await px.ask("GET", f"/sessions/{session['execution_id']}")
        assert good.deaths + bad.deaths >= 1 and shown["calls"] == 1  # its last tokens may have died with it
        # one that is down for good is taken out, and in again when it comes back
        await bad.stop()
        await until_status(px, bad.url, "down")
        await bad.start()
        await until_status(px, bad.url, "up")


async def until_status(px: Proxy, url: str, state: str) -> None:
    while True:
        _, known = await px.ask("GET", "/engines")
        if next(e for e in known["engines"] if e["url"] == url)["state"] == state:
            return
        await asyncio.sleep(0.05)


async def until_received(px: Proxy, execution_id: str, tokens: int) -> None:
    while True:  # the proxy has them, not only the engine
        _, shown = await px.ask("GET", f"/sessions/{execution_id}")
        if [call["sampled_tokens"] for call in shown["running"]] == [tokens]:
            return
        await asyncio.sleep(0.05)


async def test_a_proxy_that_starts_again_goes_on_with_its_sessions(tmp_path):  # SPEC §3.10
    engine = server("vllm")
    async with started(engine):
        async with proxy(tmp_path / "r", engine) as px:
            port = px.url.rsplit(":", 1)[1]
            session, done = await px.open(execution_id="long"), await px.open(execution_id="short")
            async with claude(session) as sdk:
                first = await sdk.messages.create(**ASK)
            assert (await px.ask("POST", "/sessions/short/close", {"outcome": "infra_abort"}))[0] == 200
            # a call under way when it ends is recorded as far as it came
            engine.on_token = lambda n: engine.gate.clear() if n == 2 else None
            hanging = asyncio.create_task(px.http.post(
                f"{session['base_url']}/v1/messages", json={**ASK, "messages": [{"role": "user", "content": "other"}]},
                headers={"x-api-key": session["key"]},
            ))  # fmt: skip
            await until_received(px, "long", 2)
            assert await px.end(signal.SIGINT) == 0
            await asyncio.gather(hanging, return_exceptions=True)
        engine.on_token = lambda n: None
        engine.gate.set()
        with Store.open(tmp_path / "r" / "calls.db", readonly=True) as store:
            cut = store.load_tree("long").calls()[-1]
            assert cut.sampled_tokens == 2 and not cut.meta.delivered
        async with proxy(tmp_path / "r", engine, args=("--port", port)) as px:
            assert any("1 sessions of the record are open again" in line for line in px.output)
            async with claude(session) as sdk:  # the harness knows nothing: same URL, same key
                more = [*ASK["messages"], {"role": "assistant", "content": first.content}]
                await sdk.messages.create(**{**ASK, "messages": [*more, {"role": "user", "content": "on"}]})
                with pytest.raises(anthropic.NotFoundError):
                    await claude(done).messages.create(**ASK)
            status, again = await px.ask("POST", "/sessions", {"execution_id": "short"})
            assert status == 409 and again["error"]["field"] == "execution_id"
            await px.ask("POST", "/sessions/long/close", {"reward": 0.5})
            _, answer = await px.ask("GET", "/sessions/long/samples")
            assert len(answer["samples"]) == 1 and sum(answer["samples"][0]["loss_mask"]) == 2 * len(says("I am here."))
            _, listed = await px.ask("GET", "/sessions")
            assert {s["execution_id"]: s["outcome"] for s in listed["sessions"]} == {
                "long": "finished",
                "short": "infra_abort",
            }


async def test_bad_input_names_the_field(tmp_path):
    engine = server("vllm")
    async with started(engine), proxy(tmp_path / "r", engine) as px:
        await px.open(execution_id="e1")
        bad: list[tuple[str, str, Any, int, str | None]] = [
            ("POST", "/sessions", {"execution_id": "a b"}, 400, "execution_id"),
            ("POST", "/sessions", {"execution_id": "e1"}, 409, "execution_id"),
            ("POST", "/sessions", {"executionid": "e1"}, 400, "executionid"),
            ("POST", "/sessions", {"split": "test"}, 400, "split"),
            ("POST", "/sessions", {"pins": {"temperature": 0}}, 400, "pins.temperature"),
            ("POST", "/sessions", {"pins": {"top_p": 0.9}}, 400, "pins"),
            ("POST", "/sessions", {"pins": {"temprature": 1.0}}, 400, "pins"),
            ("POST", "/sessions", b"{", 400, None),
            ("GET", "/sessions?state=broken", None, 400, "state"),
            ("GET", "/sessions/nobody", None, 404, None),
            ("POST", "/sessions/e1/close", {"reward": "high"}, 400, "reward"),
            ("POST", "/sessions/e1/close", {"outcome": "finished"}, 400, "reward"),
            ("POST", "/sessions/e1/close", {"outcome": "infra_abort", "reward": 1.0}, 400, "reward"),
            ("POST", "/sessions/e1/close", {"outcome": "won"}, 400, "outcome"),
            ("GET", "/sessions/e1/samples?j_max=0", None, 400, "j_max"),
            ("GET", "/sessions/e1/samples?role=boss", None, 400, "role"),
            ("GET", "/sessions/e1/samples?jmax=1", None, 400, "jmax"),
            ("DELETE", "/sessions/e1", None, 409, "execution_id"),
            ("POST", "/weights", {}, 400, "version"),
            ("POST", "/weights", {"version": -1}, 400, "version"),
        ]
        for method, path, body, status, field in bad:
            got, answer = await px.ask(method, path, body)
            assert (got, answer["error"]["field"]) == (status, field), (method, path, body, answer)
        for key in ("", "wrong", (await px.ask("GET", "/sessions/e1"))[1]["key"]):
            assert (await px.ask("GET", "/sessions", key=key))[0] == 401
        assert (await px.ask("POST", "/weights", {"version": 3}))[1]["engines"][0]["version"] == 3


async def test_what_cannot_be_recorded_right_is_refused_at_start(tmp_path):  # N08
    raw = server("vllm")
    raw.raw = True
    async with started(raw):
        with pytest.raises(AssertionError, match="--logprobs-mode processed_logprobs"):
            async with proxy(tmp_path / "a", raw, args=("--temperature", "0.7")):
                pass
        with pytest.raises(AssertionError, match="start with --context 1000"):
            raw.context = 1000
            async with proxy(tmp_path / "b", raw, args=("--context", "2048")):
                pass
        raw.context = 2048
        with pytest.raises(AssertionError, match="give the folder that it serves"):
            raw.encode = lambda text: [1, 2, 3]
            async with proxy(tmp_path / "d", raw):
                pass
        raw.encode = RENDERER.encode
        async with proxy(tmp_path / "c", raw) as px:  # at temperature 1 both are the same
            await px.open()
            status, answer = await px.ask("POST", "/sessions", {"pins": {"temperature": 0.7}})
            assert status == 400 and answer["error"]["field"] == "pins.temperature"
            with pytest.raises(AssertionError, match="in use by another process"):
                async with proxy(tmp_path / "c", raw):
                    pass


async def test_the_embedded_engine_serves_a_model_folder_by_itself(tmp_path):
    async with proxy(tmp_path / "r") as px:
        session = await px.open()
        async with claude(session) as sdk:
            message = await sdk.messages.create(**ASK)
        async with gpt(session) as sdk:
            stream = await sdk.chat.completions.create(**ASK, stream=True)
            chunks = [chunk async for chunk in stream]
        assert message.usage.output_tokens > 0 and chunks
        await px.ask("POST", f"/sessions/{session['execution_id']}/close", {"reward": 0.0})
        _, answer = await px.ask("GET", f"/sessions/{session['execution_id']}/samples?j_max=all")
        sampled = [v for s in answer["samples"] for v, m in zip(s["logprobs"], s["loss_mask"], strict=True) if m]
        assert sampled and all(v <= 0 for v in sampled)
        status, refused = await px.ask("POST", "/weights", {"version": 1})
        assert status == 409 and refused["error"]["field"] == "version"
        assert await px.end() == 0
