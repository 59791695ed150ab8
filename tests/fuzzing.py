"""Mutated requests against a whole proxy over HTTP, and what must stay true whatever they are.

    workers ── attempts ──▶ proxy ──▶ engines that fail now and then     a session each, replaced now and then
    canary  ── a decent conversation, all the while ──▶                  and an idle session nobody calls

No answer is a 5xx but for failures that were injected; every refusal is in its dialect's form; no session but the
worker's own is touched; the canary's conversation never forks; what is forgotten is freed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
from yarl import URL

from door import Door, opened
from mutations import Attempt, attempt
from opengyre.config import SamplingConfig
from opengyre.errors import EngineError, RecordError
from opengyre.rollout.base import EngineLoad, GenerateRequest, TokenChunk
from wire import CLIENTS, call

REPLIES = (
    "ok",
    "",
    "<think>\nwhy\n</think>\n\nI do.\n" + call("f", {"x": 1.0}),
    call("f", '{"broken": ') + "<tool_call>",
    "words \ud7ff é 😀 </think><|im_start|>",
    call("exec_command", {"cmd": "ls"}) + "\n" + call("Bash", {"command": "ls"}),
)
ENGINES = 3
REQUESTS_PER_SESSION = 150  # then the worker gets a new one, as executions do
HTTP_ERRORS = (400, 417, 431)  # of the HTTP server itself: what came was no HTTP request
HOSTILE = 0.01  # of attempts go past HTTP clients, as bytes
HOSTILE_WAIT_S = 0.5
HOSTILE_BYTES = (
    b"GARBAGE\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST {path} HTTP/9.9\r\nHost: x\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nX: a\rb\nc: d\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"y" * 20_000 + b"\r\n\r\n",
    b"POST {path}\x00\xff HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


class FlakyEngine:
    """Says something at once; fails for a share of calls, before or after some tokens. Implements ``RolloutEngine``."""

    def __init__(self, name: str, door: Door, rng: random.Random, failures: float) -> None:
        self.name, self._rng, self._failures = name, rng, failures
        stop = door.renderer.stop_token_ids
        self._replies = [[*door.renderer.encode(text), *stop] for text in REPLIES]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        ids = self._rng.choice(self._replies)[: request.max_new_tokens]
        stopped = ids[-1] in request.stop_token_ids
        await asyncio.sleep(0)
        if self._rng.random() < self._failures:
            if self._rng.random() < 0.5:
                raise EngineError("refused", where=self.name)
            yield TokenChunk(ids[:1], [-0.5], 0, None)
            raise EngineError("died", where=self.name)
        yield TokenChunk(ids, [-0.5] * len(ids), 0, "stop" if stopped else "length")

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, True)


@dataclass
class Report:
    """What came out."""

    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    injected: int = 0
    failures: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    def fail(self, what: str, made: Attempt | None = None, more: str = "") -> None:
        shown = f" {made.method} {made.path} {made.headers} {made.body[:3000]!r}" if made else ""
        self.failures.append(f"{what}:{shown} {more[:600]}")


async def fuzz(
    folder: Path,
    requests: int,
    *,
    seed: int = 0,
    workers: int = 8,
    failures: float = 0.005,
    limit_s: float = float("inf"),
) -> Report:
    """Send ``requests`` mutated requests, fewer if it takes longer than ``limit_s``.

    ``failures`` is the share of engine calls and of recordings that fail.
    """
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it tells of every hostile byte
    report, rng = Report(), random.Random(seed)
    async with opened(folder, context=20_000, pins=SamplingConfig(max_tokens=64)) as door:
        for i in range(ENGINES):
            door.router.add(FlakyEngine(f"engine{i}", door, rng, failures), 64)
        door.store.submit = _failing(door.store.submit, rng, failures, report)  # type: ignore[method-assign]
        door.sessions.open("idle", pins=SamplingConfig(), meta={})
        idle = _state(door, "idle")
        over = asyncio.Event()
        canary = asyncio.create_task(_canary(door, over, report))
        began = time.perf_counter()
        end = began + limit_s
        each = [_worker(door, i, seed, requests // workers, report, end) for i in range(workers)]
        await asyncio.gather(*each)
        report.seconds = time.perf_counter() - began
        over.set()
        await canary
        if _state(door, "idle") != idle:
            report.fail(f"an idle session was touched: {idle} -> {_state(door, 'idle')}")
        async with door.http.get(f"{door.sessions.base_url}/healthz") as response:
            if response.status != 200:
                report.fail("healthz")
    return report


def _failing(submit: Any, rng: random.Random, failures: float, report: Report) -> Any:
    def some_fail(execution: str, *args: Any) -> Any:
        if not execution.startswith("e") and rng.random() < failures:
            report.injected += 1
            raise RecordError("disk full", where="store")
        return submit(execution, *args)

    return some_fail


def _state(door: Door, name: str) -> tuple[Any, ...]:
    session = door.sessions.get(name)
    return len(session.tree), len(session.tree.calls()), str(session.counters), session.started, session.history.epoch


async def _worker(door: Door, number: int, seed: int, requests: int, report: Report, end: float) -> None:
    rng = random.Random(f"{seed}.{number}")
    name, key, url, own = "", "", "", 0
    for i in range(requests):
        if time.perf_counter() > end:
            break
        if i % REQUESTS_PER_SESSION == 0:
            if name:
                _check_session(door, name, own, report)
                door.sessions.forget(name)
            name, own = f"w{number}.{i}", 0
            url, key = door.sessions.open(name, pins=SamplingConfig(max_tokens=64), meta={})
        own += 1
        report.requests += 1
        if rng.random() < HOSTILE:
            await _hostile(door, url, rng, report)
        else:
            await _send(door, url, key, attempt(rng), report)
        if report.requests % 2000 == 0:
            report.rss_mib.append(psutil.Process().memory_info().rss / 2**20)


def _check_session(door: Door, name: str, own: int, report: Report) -> None:
    """A session saw its own requests at most, and all its paths rebuild."""
    session = door.sessions.get(name)
    counters = session.counters
    if counters.calls + counters.joined + counters.refused > own + report.injected:
        report.fail(f"{name} counts more than its {own} requests: {counters}")
    for leaf in session.tree.leaves():
        session.tree.rebuild(leaf)


async def _send(door: Door, url: str, key: str, made: Attempt, report: Report) -> None:
    headers = {"Authorization": f"Bearer {key}", **made.headers}
    target = URL(f"{url}{made.path}", encoded=True)
    try:
        async with door.http.request(made.method, target, data=made.body, headers=headers) as response:
            if made.cut_after is not None:
                if made.cut_after:
                    await response.content.read(made.cut_after)
                response.close()
                report.statuses["left"] += 1
                return
            raw = await response.read()
    except ValueError:  # the client refuses to send such a header
        report.statuses["not sent"] += 1
        return
    except (aiohttp.ClientError, TimeoutError) as error:
        report.fail(f"no answer ({error!r})", made)
        return
    report.statuses[str(response.status)] += 1
    if wrong := _wrong(response, raw, made, report):
        report.fail(wrong, made, raw.decode("utf-8", "replace"))


def _wrong(response: aiohttp.ClientResponse, raw: bytes, made: Attempt, report: Report) -> str:
    """What is wrong with an answer; "" if nothing is."""
    status, streamed = response.status, response.content_type == "text/event-stream"
    if "X-Injected" in response.headers:
        return "a header was injected"
    if status >= 500:
        return "" if status == 529 and report.injected else f"status {status}"
    if made.method == "HEAD" or (response.content_type == "text/plain" and status in HTTP_ERRORS):
        return ""
    if status == 200 and streamed:
        return "" if b"[DONE]" in raw or b"message_stop" in raw or b"response." in raw or b"error" in raw else "no end"
    try:
        answer = json.loads(raw)
    except ValueError:
        return f"status {status} without JSON"
    if status == 200:
        return "" if isinstance(answer, dict) and ("error" not in answer or not answer["error"]) else "200 and an error"
    error = answer.get("error") if isinstance(answer, dict) else None
    formed = isinstance(error, dict) and error.get("message") and error.get("type")
    return "" if formed and (status in (404, 405) or response.headers.get("x-should-retry") == "false") else "form"


async def _hostile(door: Door, url: str, rng: random.Random, report: Report) -> None:
    """Bytes that are hardly HTTP; the server may say 4xx or hang up."""
    split = urlsplit(url)
    sent = rng.choice(HOSTILE_BYTES).replace(b"{path}", f"{split.path}/v1/messages".encode())
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    try:
        writer.write(sent)
        await writer.drain()
        head = (await asyncio.wait_for(reader.read(4096), HOSTILE_WAIT_S)).split(b"\r\n")[0]
    except (OSError, TimeoutError) as error:  # a body that is never sent is waited for
        head = f"hostile: {type(error).__name__}".encode()
    finally:
        writer.close()
    status = head.split(b" ")[1].decode() if head.startswith(b"HTTP/") else "waits" if head else "hangs up"
    report.statuses[f"hostile {status}"] += 1
    if status.startswith("5"):
        report.fail(f"hostile bytes {sent[:80]!r} -> {head!r}")


async def _canary(door: Door, over: asyncio.Event, report: Report) -> None:
    """A conversation that only grows, in turns of all three formats' clients, begun anew when it gets long."""
    turns, number = 0, 0
    while not over.is_set():
        name, dialect = f"e{number}", list(CLIENTS)[number % len(CLIENTS)]
        number += 1
        client = CLIENTS[dialect]
        url, key = door.sessions.open(name, pins=SamplingConfig(max_tokens=64), meta={})
        entries = [client.says("go")]
        for turn in range(20):
            sent = door.http.post(f"{url}{client.path}", json=client.body(entries, ("f",)), headers={"x-api-key": key})
            async with sent as response:
                answer = await response.json()
            if response.status != 200:
                report.fail(f"canary got {response.status}", more=str(answer))
                return
            said = client.turn(answer)
            results = client.results([(i, "r") for i in client.calls(said)])
            entries += [*said, *results, client.says(f"turn {turn}")]
            turns += 1
            await asyncio.sleep(0)
        tree, counters = door.sessions.get(name).tree, door.sessions.get(name).counters
        if len(tree.leaves()) != 1 or counters.calls != 20 or counters.refused:
            report.fail(f"canary {name}: {len(tree.leaves())} leaves, {counters}")
        door.sessions.forget(name)
    report.statuses["canary turns"] += turns
