"""What the proxy benchmarks are played on: an engine that answers at once, our proxy in a process of its own, clients.

    client (this process) ── HTTP ──▶ proxy under test (own process) ── HTTP ──▶ stub engine (own process)

Everything that is not under test does as little as can be: the engine reads a request and sends bytes made before; the
client sends bodies that grow by bytes it has at hand.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import psutil
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.config import SamplingConfig
from opengyre.proxy import app as door
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.heap import settle
from opengyre.proxy.lines import Lines
from opengyre.proxy.render import Renderer
from opengyre.proxy.router import Router
from opengyre.proxy.session import Sessions
from opengyre.proxy.template import ChatTemplate
from opengyre.record.store import Store
from opengyre.rollout.base import EngineLoad, GenerateRequest, TokenChunk
from opengyre.rollout.sglang import SglangEngine

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONTEXT = 1 << 20
REPLY_WORDS = 120  # what the policy says in a turn: a call and the reasons for it
RESULT_WORDS = 180  # and what a tool answers: about 500 tokens together
SPAWN = multiprocessing.get_context("spawn")


class Words:
    """Text of a made-up language and a tokenizer trained on it: 4 to 5 characters a token, as code and English have."""

    def __init__(self) -> None:
        random = Random(0)
        letters = "etaoinshrdlucmfwyp"
        self.words = ["".join(random.choices(letters, k=random.randint(2, 8))) for _ in range(2000)]
        self.random = random
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=4000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        made.train_from_iterator([self.text(2000) for _ in range(40)], trainer)
        made.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
        self.tokenizer = made

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(self.words, k=words))

    def renderer(self) -> Renderer:
        return Renderer(self.tokenizer, ChatTemplate(CHATML, {"eos_token": "<|im_end|>"}), context=CONTEXT)


# -- the engine --------------------------------------------------------------------------------------------------------


def stub_engine(pipe: Connection) -> None:
    """Answers OpenAI's chat completions (for the peers) and SGLang's /generate (for us) with the same turn, at once."""
    words = Words()
    ids = [*words.tokenizer.encode(words.text(REPLY_WORDS)).ids, words.tokenizer.token_to_id("<|im_end|>")]
    text = words.tokenizer.decode(ids[:-1])
    logprobs = [-0.5 - 0.001 * i for i in range(len(ids))]
    meta = {
        "completion_tokens": len(ids),
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
        "weight_version": "0",
    }
    event = b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\ndata: [DONE]\n\n"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "x", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]},
    }
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": len(ids) + 1}
    completion = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    ).encode()

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=completion, content_type="application/json")

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=event, content_type="text/event-stream")

    async def fine(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def serve() -> None:
        made = web.Application(client_max_size=1 << 30)
        made.router.add_post("/v1/chat/completions", chat)
        made.router.add_post("/generate", generate)
        made.router.add_post("/abort_request", fine)
        for path in ("/health", "/v1/models", "/model_info"):
            made.router.add_get(path, fine)
        runner = web.AppRunner(made, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.to_thread(pipe.poll, None)  # until the other end is gone

    asyncio.run(serve())


class InstantEngine:
    """The same without a wire: for what the proxy alone does."""

    name = "instant"

    def __init__(self, words: Words) -> None:
        self.ids = [*words.tokenizer.encode(words.text(REPLY_WORDS)).ids, words.tokenizer.token_to_id("<|im_end|>")]
        self.logprobs = [-0.5] * len(self.ids)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(self.ids, self.logprobs, 0, "stop")

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, True)


# -- our proxy ---------------------------------------------------------------------------------------------------------


@dataclass
class Spent:
    """Seconds of each call by what they went to, how late the loop was, and what the cycle collector took at once."""

    matching: list[float] = field(default_factory=list)
    recording: list[float] = field(default_factory=list)
    matching_cpu: list[float] = field(default_factory=list)  # of all threads: means something with one call at a time
    recording_cpu: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # the loop's CPU time until a timer of 10 ms was heard
    walks: list[float] = field(default_factory=list)  # CPU seconds of the cycle collector going through all it knows
    _began: float = 0.0

    def clear(self) -> None:
        """Begin anew."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(self, name, [])

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """A callback of the cycle collector."""
        if phase == "start":
            self._began = time.thread_time()
        elif info["generation"] == 2:
            self.walks.append(time.thread_time() - self._began)


def our_proxy(pipe: Connection, engine_url: str | None, executions: list[str], folder: str) -> None:
    """Serve. On the pipe: ``open`` and ``end`` executions, time ``spent``, objects ``tracked`` by the cycle collector,
    unique ``tokens``, bytes ``stored``."""
    words, spent = Words(), Spent()
    _instrument(spent)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        store = Store.open(Path(folder) / "calls.db")
        sessions, router = Sessions(store), Router()
        driver = CallDriver(words.renderer(), router, sessions)
        server = ProxyServer(sessions, driver)
        await server.start()
        engine = SglangEngine("stub", engine_url) if engine_url else InstantEngine(words)
        router.add(engine, 10_000)

        def ask() -> None:
            try:
                question = pipe.recv()
            except EOFError:
                sys.exit()  # the other end is gone
            match question:
                case ("open", names):
                    pipe.send({n: sessions.open(n, pins=SamplingConfig(), meta={}) for n in names})
                case ("end", names):
                    for name in names:
                        sessions.forget(name)
                    pipe.send(_rss())
                case ("spent",):
                    pipe.send(spent)
                    spent.clear()
                case ("tracked",):
                    pipe.send(len(gc.get_objects()))
                case ("tokens", name):
                    pipe.send(sessions.get(name).tree.unique_tokens)
                case ("stored",):
                    store.close()  # the write-ahead log moves into the file
                    pipe.send(store.path.stat().st_size)

        loop.add_reader(pipe.fileno(), ask)
        pipe.send({n: sessions.open(n, pins=SamplingConfig(), meta={}) for n in executions})
        while True:
            due, used = loop.time() + 0.01, time.thread_time()
            await asyncio.sleep(0.01)
            spent.lag.append(loop.time() - due)
            spent.busy.append(time.thread_time() - used)

    settle()  # as opengyre does when it serves
    gc.callbacks.append(spent.collected)
    asyncio.run(serve())


def _rss() -> int:
    return psutil.Process().memory_info().rss


def _instrument(spent: Spent) -> None:
    """Time what is claimed not to grow: finding, reading, matching and rendering a request; recording a call."""
    find, prepare, record = Lines.find, door.prepare, CallDriver._record
    finding = (0.0, 0.0)

    def timed_find(*args: Any) -> Any:
        nonlocal finding
        began, used = time.perf_counter(), time.process_time()
        found = find(*args)
        finding = time.perf_counter() - began, time.process_time() - used
        return found

    def timed_prepare(*args: Any) -> Any:
        began, used = time.perf_counter(), time.process_time()
        prepared = prepare(*args)
        spent.matching.append(time.perf_counter() - began + finding[0])
        spent.matching_cpu.append(time.process_time() - used + finding[1])
        return prepared

    async def timed_record(*args: Any) -> None:
        began, used = time.perf_counter(), time.process_time()
        await record(*args)
        spent.recording.append(time.perf_counter() - began)
        spent.recording_cpu.append(time.process_time() - used)

    Lines.find, door.prepare, CallDriver._record = timed_find, timed_prepare, timed_record  # type: ignore[method-assign]


@contextmanager
def process(target: Callable[..., None], *args: Any, nice: int = 0):
    """A process with a pipe; yields (process, pipe, first message)."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
    child.start()
    try:
        yield psutil.Process(child.pid), ours, ours.recv()
    finally:
        child.terminate()
        child.join()


@contextmanager
def our_stage(executions: list[str], engine_url: str | None = None):
    """Our proxy with open sessions; yields (process, pipe, {execution: (url, key)})."""
    with TemporaryDirectory() as folder, process(our_proxy, engine_url, executions, folder) as stage:
        yield stage


# -- clients -----------------------------------------------------------------------------------------------------------


class Talk:
    """One execution's growing conversation as bytes of a chat-completions body."""

    def __init__(self, words: Words, tokens: int, url: str, key: str) -> None:
        self.url, self.headers = f"{url}/chat/completions", {"Authorization": f"Bearer {key}", **_JSON}
        self._entries = bytearray(b'{"model":"m","messages":[' + _entry("system", words.text(150)))
        self._words = words
        self._add("user", words.text(RESULT_WORDS))
        while len(self._entries) < 4.6 * tokens:
            self._add("assistant", words.text(REPLY_WORDS))
            self._add("user", words.text(RESULT_WORDS))

    @property
    def body(self) -> bytes:
        return bytes(self._entries) + b"]}"

    def said(self, text: str) -> None:
        """The reply, and what comes after it."""
        self._add("assistant", text)
        self._add("user", self._words.text(RESULT_WORDS))

    async def call(self, http: aiohttp.ClientSession) -> float:
        """One call; returns its seconds. Raises RuntimeError unless it is answered as it should be."""
        body = self.body
        began = time.perf_counter()
        async with http.post(self.url, data=body, headers=self.headers) as response:
            answer = await response.read()
        took = time.perf_counter() - began
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:300]!r}")
        self.said(json.loads(answer)["choices"][0]["message"]["content"])
        return took

    def _add(self, role: str, text: str) -> None:
        self._entries += b"," + _entry(role, text)


_JSON = {"Content-Type": "application/json"}


def _entry(role: str, text: str) -> bytes:
    return json.dumps({"role": role, "content": text}).encode()


def client() -> aiohttp.ClientSession:
    """Any number of connections, any time."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    times = [p.cpu_times() for p in [process, *process.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def percentile(values: list[float], q: float) -> float:
    """In the unit of the values."""
    return float(np.percentile(values, q)) if values else float("nan")


def own_cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
