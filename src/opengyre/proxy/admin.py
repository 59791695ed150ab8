"""The trainer's door: sessions and weights versions over HTTP, beside the harnesses' own.

    POST /sessions            open: base URL, key and environment for a harness
    GET  /sessions            all executions of the record; ?state=open|closed
    GET  /sessions/ID         one: state, counters, outcome
    POST /sessions/ID/close   end it, with its reward; again to give the reward later
    GET  /sessions/ID/samples token-level samples; ?j_max=, seed=, role=, messages=1
    GET  /sessions/ID/tree    the trajectory tree
    DELETE /sessions/ID       free the memory of a closed one
    GET  /engines             the servers and what is known of them
    POST /weights             {"version": N}: the servers sample with N from now on

Every request carries the admin key. An answer other than 2xx is ``{"error": {"type", "message", "field"}}``.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from opengyre.errors import OpenGyreError
from opengyre.export.source import EVERY_LEAF, Choice
from opengyre.proxy.body import read_body
from opengyre.proxy.external import Closing, External, Opening
from opengyre.proxy.refusals import Refusal
from opengyre.record.types import Role

T = TypeVar("T")
Answer = Callable[[web.Request], Awaitable[Any]]


class Engines(Protocol):
    """What the door says of, and to, the servers behind it."""

    def status(self) -> list[dict[str, Any]]:
        """What is known of each."""
        ...

    def tell_version(self, version: int) -> None:
        """The weights are ``version`` now. Raises Refusal when they cannot change."""
        ...


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /weights."""

    version: int


class AdminDoor:
    """The handlers, and their routes."""

    def __init__(self, external: External, engines: Engines, admin_key: str) -> None:
        self._external, self._engines, self._key = external, engines, admin_key

    def routes(self) -> list[web.RouteDef]:
        """For ``ProxyServer``."""
        one = "/sessions/{execution}"
        return [
            web.post("/sessions", self._answering(self._open)),
            web.get("/sessions", self._answering(self._list)),
            web.get(one, self._answering(self._show)),
            web.delete(one, self._answering(self._forget)),
            web.post(f"{one}/close", self._answering(self._close)),
            web.get(f"{one}/samples", self._answering(self._samples)),
            web.get(f"{one}/tree", self._answering(self._tree)),
            web.get("/engines", self._answering(self._list_engines)),
            web.post("/weights", self._answering(self._weights)),
        ]

    def _answering(self, handler: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        """``handler`` behind the admin key, its answer and its errors as JSON."""

        async def answer(request: web.Request) -> web.Response:
            try:
                self._authorise(request)
                found = await handler(request)
            except Refusal as refusal:
                return _json(_error(refusal.kind, str(refusal), refusal.param), refusal.status)
            except OpenGyreError as error:
                return _json(_error("api_error", str(error), None), 500)
            return _json(found, 201 if request.method == "POST" and request.path == "/sessions" else 200)

        return answer

    def _authorise(self, request: web.Request) -> None:
        bearer = request.headers.get("Authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise Refusal("invalid admin key", status=401, kind="authentication_error")

    async def _open(self, request: web.Request) -> Any:
        return self._external.open(await _body(request, Opening))

    async def _list(self, request: web.Request) -> Any:
        return {"sessions": await asyncio.to_thread(self._external.listing, request.query.get("state"))}

    async def _show(self, request: web.Request) -> Any:
        return self._external.show(request.match_info["execution"])

    async def _forget(self, request: web.Request) -> Any:
        self._external.forget(request.match_info["execution"])
        return {"execution_id": request.match_info["execution"]}

    async def _close(self, request: web.Request) -> Any:
        return await self._external.close(request.match_info["execution"], await _body(request, Closing))

    async def _samples(self, request: web.Request) -> Any:
        execution_id, choice = request.match_info["execution"], _choice(request)
        rows = await asyncio.to_thread(self._external.samples, execution_id, choice)
        return {"execution_id": execution_id, "samples": rows}

    async def _tree(self, request: web.Request) -> Any:
        return await asyncio.to_thread(self._external.tree, request.match_info["execution"])

    async def _list_engines(self, _: web.Request) -> Any:
        return {"engines": self._engines.status()}

    async def _weights(self, request: web.Request) -> Any:
        asked = await _body(request, Weights)
        if asked.version < 0:
            raise Refusal(f"version: {asked.version}; 0 or more", param="version")
        self._engines.tell_version(asked.version)
        return {"engines": self._engines.status()}


async def _body(request: web.Request, kind: type[T]) -> T:
    """The request's body; none is an empty one. Raises Refusal (400) naming the field."""
    raw = await read_body(request)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or _quoted(what)
        raise Refusal(f"{field}: {what}" if field else what, param=field or None) from None
    except msgspec.DecodeError as error:
        raise Refusal(f"the body is not JSON: {error}") from None


def _quoted(what: str) -> str:
    """The field that a message like "contains unknown field `x`" names."""
    return what.split("`")[1] if what.count("`") == 2 and "field" in what else ""


def _choice(request: web.Request) -> Choice:
    """The selection that a query string asks for. Raises Refusal (400) naming the parameter."""
    query = request.query
    if unknown := set(query) - {"j_max", "seed", "role", "messages"}:
        raise Refusal(f"{min(unknown)}: unknown; j_max, seed, role, messages", param=min(unknown))
    roles = query.getall("role", [])
    if bad := [role for role in roles if role not in list(Role)]:
        raise Refusal(f"role: {bad[0]!r}; one of {', '.join(Role)}", param="role")
    j_max = EVERY_LEAF if query.get("j_max") == "all" else _whole(request, "j_max", 5, least=1)
    return Choice(
        j_max=j_max,
        seed=_whole(request, "seed", 0, least=0),
        roles=tuple(map(Role, roles)) or tuple(Role),
        messages=query.get("messages", "0") not in ("0", "false", ""),
    )


def _whole(request: web.Request, name: str, default: int, *, least: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise Refusal(f"{name}: {text!r}; a whole number from {least} on", param=name)
    return int(text)


def _error(kind: str, message: str, field: str | None) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "field": field}}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
