"""A whole proxy for tests: real HTTP, real store, scripted engines."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from engines import Script, ScriptedEngine
from opengyre.config import ProxyConfig, SamplingConfig
from opengyre.proxy.app import ProxyServer
from opengyre.proxy.calls import CallDriver
from opengyre.proxy.recall import recall
from opengyre.proxy.render import Renderer
from opengyre.proxy.router import Router
from opengyre.proxy.session import Session, Sessions
from opengyre.record.store import Store
from policies import CHATML, renderer


@dataclass
class Door:
    """Everything a test reaches for. ``post`` is one call of the execution ``e``."""

    renderer: Renderer
    script: Script
    store: Store
    router: Router
    sessions: Sessions
    driver: CallDriver
    server: ProxyServer
    http: aiohttp.ClientSession
    url: str = ""
    key: str = ""
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)

    def engine(self, name: str = "a", *, slots: int = 8, **options: Any) -> ScriptedEngine:
        """Add a scripted engine."""
        made = ScriptedEngine(name, self.script, **options)
        self.engines[name] = made
        self.router.add(made, slots)
        return made

    @property
    def session(self) -> Session:
        return self.sessions.get("e")

    def request(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        auth = {"Authorization": f"Bearer {self.key}"}
        return self.http.post(f"{self.url}{path}", json=body, headers={**auth, **headers})

    def restart(self) -> None:
        """From now on the session knows what a proxy knows that starts again on its record."""
        tree = self.store.load_tree("e")
        self.session.resume(tree, recall(tree, partial(self.store.messages, "e")))
        self.sessions.lines.forget("e")

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.request(path, body, **headers) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.request(path, {**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            return events(await response.read())


def events(raw: bytes) -> list[dict[str, Any]]:
    """Data of server-sent events, in order."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    template: str = CHATML,
    render: Renderer | None = None,
    context: int = 100_000,
    pins: Any = None,
    max_calls: int = 1000,
    **proxy: Any,
):
    """A running proxy with one open execution, ``e``, and no engine yet."""
    render = render or renderer(template, context=context)
    store = Store.open(folder / "calls.sqlite")
    sessions, router = Sessions(store, max_calls=max_calls), Router()
    driver = CallDriver(render, router, sessions)
    server = ProxyServer(sessions, driver, ProxyConfig(**proxy))
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            door = Door(render, Script(render), store, router, sessions, driver, server, http)
            door.url, door.key = sessions.open("e", pins=pins or SamplingConfig(), meta={"task": "t"})
            yield door
    finally:
        await server.stop()
        store.close()
