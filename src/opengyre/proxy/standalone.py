"""The recording proxy as a product of its own: in front of any engine, for people who keep their trainer.

    harness ──▶ /x/ID/… ─┐                                     ┌─▶ SGLang, vLLM   (pool: up, watched, checked)
                         ├─▶ sessions ▸ calls ▸ router ────────┤
    trainer ──▶ /sessions┘        │                            └─▶ or the embedded engine, in a process of its own
                                  ▼
                  RECORD_DIR: calls.db (calls, outcomes), proxy.json (with which tokenizer), lock

It ends on SIGINT and SIGTERM: calls under way are cut at a token boundary and recorded, then the engines are left.
Started again on the same folder it goes on where it was: sessions that nobody closed are open.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from opengyre.config import ProxyConfig, RunConfig, SamplingConfig, build
from opengyre.errors import ConfigError
from opengyre.export.source import Source
from opengyre.proxy.admin import AdminDoor
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.embedded import Embedded
from opengyre.proxy.external import External, ProxyStore
from opengyre.proxy.heap import settle
from opengyre.proxy.pool import POLL_S, Pool
from opengyre.proxy.render import Renderer
from opengyre.proxy.router import Router
from opengyre.proxy.session import Sessions, check_pins
from opengyre.rollout.http_kinds import Kind, connect

SETTINGS_FILE = "proxy.json"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # what token ids depend on
ANY_ADDRESS = ("0.0.0.0", "::", "")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What a standalone proxy is started with.

    Args:
        model: a Hugging Face folder: tokenizer and chat template; with ``engines`` empty its weights too.
        folder: where calls are recorded; made if need be.
        engines: URLs of servers; none: the embedded engine.
        kind: of the servers.
        engine_key: bearer token that they want.
        admin_key: of the trainer's door; empty: one is made.
        context: tokens, prompt and reply together; None: what model and servers take.
        format: how the model writes turns; None: found from its chat template.
        pins: of sessions that bring none of their own.
        slots: calls that one server gets at once.
        max_calls: model calls per session.
        wait_s: how long a server may take to come up.
        poll_s: how often a server is asked whether it lives.
        public_url: where harnesses reach the proxy; empty: host and port.
    """

    model: Path
    folder: Path
    engines: tuple[str, ...] = ()
    kind: Kind = "auto"
    engine_key: str | None = None
    admin_key: str = ""
    context: int | None = None
    format: str | None = None
    pins: SamplingConfig = field(default_factory=SamplingConfig)
    slots: int = 256
    max_calls: int = 100_000
    wait_s: float = 600.0
    poll_s: float = POLL_S
    public_url: str = ""
    proxy: ProxyConfig = field(default_factory=ProxyConfig)


@dataclass(frozen=True)
class Running:
    """A proxy that serves."""

    url: str
    admin_key: str
    external: External
    reopened: int


def serve(settings: Settings, say: Say, ready: Callable[[Running], None]) -> None:
    """Run until SIGINT or SIGTERM. Raises OpenGyreError for what keeps it from starting."""
    asyncio.run(_serve(settings, say, ready))


async def _serve(settings: Settings, say: Say, ready: Callable[[Running], None]) -> None:
    task, served = asyncio.current_task(), asyncio.Event()
    assert task is not None
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        if not served.is_set():
            task.cancel()  # it still starts: nothing is under way

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        async with running(settings, say) as proxy:
            served.set()
            ready(proxy)
            await stop.wait()
            say("ending: calls under way are recorded")
    except asyncio.CancelledError:
        if not stop.is_set():
            raise


@asynccontextmanager
async def running(settings: Settings, say: Say) -> AsyncIterator[Running]:
    """A standalone proxy, up while the block runs.

    Raises:
        ConfigError: a model folder, record folder, port, option or server that cannot be used, and why.
        CellError: the embedded engine did not start.
    """
    pins = check_pins(settings.pins)
    if settings.proxy.host in ANY_ADDRESS and not settings.public_url:
        what = f"is needed with --host {settings.proxy.host}: harnesses must be told an address they can reach"
        raise ConfigError(what, where="--public-url", right="http://this-machine:port")
    renderer = Renderer.load(settings.model, context=settings.context, format=settings.format)
    async with AsyncExitStack() as stack:
        stack.callback(_claim(settings).close)
        store = ProxyStore.open(settings.folder / "calls.db")
        stack.callback(store.close)
        source = stack.enter_context(Source(settings.folder))
        router, began = Router(), time.time()
        sessions = Sessions(store, max_calls=settings.max_calls)
        driver = CallDriver(renderer, router, sessions, clock=lambda: time.time() - began)
        engines = await _engines(settings, renderer, router, say, stack)
        admin_key = settings.admin_key or secrets.token_urlsafe(24)
        external = External(
            sessions,
            driver,
            store,
            source,
            admin_key=admin_key,
            pins=pins,
            allows=engines.allows if isinstance(engines, Pool) else lambda _: None,
            new_id=lambda: f"e-{secrets.token_hex(6)}",
        )
        routes = AdminDoor(external, engines, admin_key).routes()
        server = ProxyServer(sessions, driver, settings.proxy, routes)
        reopened = external.reopen()
        settle()
        await server.start(settings.proxy.host, settings.proxy.port)
        stack.push_async_callback(server.stop)
        sessions.base_url = settings.public_url.rstrip("/") or sessions.base_url
        yield Running(sessions.base_url, admin_key, external, reopened)


async def _engines(
    settings: Settings, renderer: Renderer, router: Router, say: Say, stack: AsyncExitStack
) -> Pool | Embedded:
    """What samples, up; ``stack`` ends it."""
    if not settings.engines:
        embedded = Embedded(_embedded_config(settings, renderer), settings.model, settings.folder / "logs", router, say)
        stack.push_async_callback(embedded.close)
        await embedded.start()
        return embedded
    found = await connect(list(settings.engines), settings.kind, api_key=settings.engine_key)
    pool = Pool(
        found, router, renderer, temperature=settings.pins.temperature, slots=settings.slots, say=say,
        poll_s=settings.poll_s, fit_context=settings.context is None,
    )  # fmt: skip
    stack.push_async_callback(pool.close)
    await pool.start(settings.wait_s)
    return pool


def _embedded_config(settings: Settings, renderer: Renderer) -> RunConfig:
    context = renderer.context
    return build(
        {
            "model": {"path": str(settings.model), "context": context},
            "sampling": {"temperature": settings.pins.temperature},
            "cells": {"slots": settings.slots, "kv_tokens": max(65536, 2 * context)},  # one whole call beside others
        }
    )


def _claim(settings: Settings) -> IO[bytes]:
    """Make the record folder and lock it for this process.

    Raises ConfigError: it cannot be made, is in use, belongs to a training run, or was recorded with other tokens.
    """
    folder = settings.folder
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a training run", where="--dir", right="a folder of its own")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", where="--dir", right="a folder that can be written") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remember(settings)
    except OSError:
        lock.close()
        raise ConfigError(f"{folder} is in use by another process", where="--dir") from None
    except ConfigError:
        lock.close()
        raise
    return lock


def _remember(settings: Settings) -> None:
    """Write down whose tokens are recorded here, or check that it is the same policy's."""
    digest = hashlib.blake2b(digest_size=16)
    for name in TEXT_FILES:
        file = settings.model / name
        digest.update(file.read_bytes() if file.is_file() else b"-")
    file = settings.folder / SETTINGS_FILE
    if not file.exists():
        file.write_text(json.dumps({"model": str(settings.model.absolute()), "text": digest.hexdigest()}) + "\n")
        return
    known = json.loads(file.read_text())
    if known["text"] != digest.hexdigest():
        what = f"{settings.folder} was recorded with the tokenizer and template of {known['model']}, which differ"
        raise ConfigError(what, where="--model", right="the same ones, or another --dir")
