"""The one door for harnesses: HTTP in, calls driven, bytes out.

    request ─▶ prefix + key ─▶ parse ─▶ prepare ─▶ 4xx in the dialect's form
                                           │ fits
                                           ▼
               200, message_start ─▶ (ping | delta)* ─▶ recorded ─▶ the rest of the turn

A stream answers before anything is sampled and is never silent for longer than ``keepalive_s``, whatever cells do; an
answer that is not streamed keeps its client with blanks before the JSON. A client that goes away cancels its handler,
which leaves the call.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from opengyre.config import ProxyConfig
from opengyre.errors import ConfigError, OpenGyreError
from opengyre.proxy.body import MAX_BODY_BYTES, read_body
from opengyre.proxy.calls import CallDriver, LiveCall
from opengyre.proxy.dialects import models
from opengyre.proxy.dialects.base import Dialect, Emitter, Head, compact
from opengyre.proxy.dialects.chat import Chat
from opengyre.proxy.dialects.messages import Messages
from opengyre.proxy.dialects.responses import Responses
from opengyre.proxy.refusals import Refusal
from opengyre.proxy.reply import Reply
from opengyre.proxy.request import HEADERS, Asked, count, prepare
from opengyre.proxy.session import Session, Sessions
from opengyre.proxy.stream import TextStream
from opengyre.record.types import Finish

INLINE_BYTES = 16 << 10  # encoding takes about 1 us a byte; a longer one would delay every ping
ASIDE_THREADS = 2  # long histories read for the first time; more threads would only take the interpreter from the loop
SHUTDOWN_S = 2.0  # open answers get this long when the server stops

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    sessions: Sessions,
    driver: CallDriver,
    config: ProxyConfig | None = None,
    routes: Iterable[web.AbstractRouteDef] = (),
) -> web.Application:
    """The proxy as an aiohttp application; ``routes`` are served beside the harness's own."""
    door = _Door(sessions, driver, config or ProxyConfig())
    messages, chat, responses = Messages(), Chat(), Responses()
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.on_cleanup.append(door.close)
    app.router.add_get("/healthz", door.health)
    app.router.add_routes(routes)
    app.router.add_route("HEAD", "/x/{execution}/api/hello", door.hello)
    for prefix in ("/x/{execution}/v1", "/x/{execution}"):  # clients disagree on whose part of the URL v1 is
        app.router.add_post(f"{prefix}/messages", door.answering(messages, door.generate))
        app.router.add_post(f"{prefix}/messages/count_tokens", door.answering(messages, door.count))
        app.router.add_post(f"{prefix}/chat/completions", door.answering(chat, door.generate))
        app.router.add_post(f"{prefix}/responses", door.answering(responses, door.generate))
        app.router.add_post(f"{prefix}/responses/input_tokens", door.answering(responses, door.count))
        app.router.add_get(f"{prefix}/models", door.answering(chat, door.models))
        app.router.add_get(f"{prefix}/models/{{model:.+}}", door.answering(chat, door.models))
    app.router.add_route("*", "/{rest:.*}", door.unknown)
    return app


class ProxyServer:
    """The application on a port."""

    def __init__(
        self,
        sessions: Sessions,
        driver: CallDriver,
        config: ProxyConfig | None = None,
        routes: Iterable[web.AbstractRouteDef] = (),
    ) -> None:
        self._sessions, self._driver = sessions, driver
        app = make_app(sessions, driver, config, routes)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, auto_decompress=False
        )

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port. Raises ConfigError when it cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
            raise ConfigError(f"{host}:{port} {what}", where="proxy.port", right="a free port, or 0 for any") from None
        bound = int(self._runner.addresses[0][1])
        self._sessions.base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        return bound

    async def stop(self) -> None:
        """End all calls, recording what was sampled, and stop listening."""
        await self._driver.stop()
        await self._runner.cleanup()


class _Door:
    """The handlers."""

    def __init__(self, sessions: Sessions, driver: CallDriver, config: ProxyConfig) -> None:
        self._sessions, self._driver, self._config = sessions, driver, config
        self._aside = ThreadPoolExecutor(ASIDE_THREADS, "render")

    async def close(self, _: web.Application) -> None:
        """End the threads."""
        self._aside.shutdown(wait=False, cancel_futures=True)

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Is the proxy up, and who serves."""
        router = self._driver.router
        return web.json_response({"ok": True, "engines": router.engines, "waiting": router.waiting})

    async def hello(self, _: web.Request) -> web.StreamResponse:
        """A client's connectivity check."""
        return web.Response()

    async def unknown(self, request: web.Request) -> web.StreamResponse:
        """Any other path, in the form most clients read."""
        refusal = Refusal(f"no such endpoint: {request.path}", status=404, kind="not_found_error")
        dialect: Dialect = Messages() if "messages" in request.path else Chat()
        return _refused(dialect, refusal, request)

    def answering(
        self, dialect: Dialect, handler: Callable[[web.Request, Dialect, Session], Awaitable[web.StreamResponse]]
    ) -> Handler:
        """``handler`` behind the key check, with every error in the dialect's form."""

        async def answer(request: web.Request) -> web.StreamResponse:
            session: Session | None = None
            try:
                session = self._sessions.authorise(request.match_info["execution"], _keys(request))
                session.check_open()
                return await handler(request, dialect, session)
            except OpenGyreError as error:
                if session is not None:
                    session.counters.refused += 1
                return _refused(dialect, _as_refusal(error, session), request)

        return answer

    async def count(self, request: web.Request, dialect: Dialect, session: Session) -> web.StreamResponse:
        """Anthropic's count_tokens, OpenAI's input_tokens: the number a generation would report."""
        asked = await self._asked(request, dialect, session)
        tokens = await self._work(asked, count, self._driver.renderer, session, asked)
        return web.json_response(dialect.counted(tokens))

    async def models(self, request: web.Request, _: Dialect, __: Session) -> web.StreamResponse:
        """The policy under the name that is asked for, or under its own."""
        context = self._driver.renderer.context
        name = request.match_info.get("model")
        return web.json_response(models.listing(context) if name is None else models.entry(name, context))

    async def generate(self, request: web.Request, dialect: Dialect, session: Session) -> web.StreamResponse:
        """A model call, streamed or not."""
        asked = await self._asked(request, dialect, session)
        headers = {name: value for name in HEADERS if (value := request.headers.get(name))}
        prepared = await self._work(asked, prepare, self._driver.renderer, session, asked, headers)
        conversation = prepared.conversation
        live = await self._driver.start(session, prepared)
        head = Head(live.call_id, conversation, live.prepared.prompt.depth)
        answered = False
        try:
            if conversation.stream:
                emitter = dialect.emitter(head)
                response = await self._stream(request, emitter, live)
            else:
                response = await self._whole(request, dialect, live, head)
            answered = True
        except ConnectionError:
            return web.Response()  # nobody reads it
        finally:
            self._driver.leave(live, answered=answered)
        return response

    async def _asked(self, request: web.Request, dialect: Dialect, session: Session) -> Asked:
        """The body, and how much of it is known."""
        body = await read_body(request)
        line, cut = self._sessions.lines.find(session.execution_id, dialect.name, session.history.epoch, body)
        return Asked(dialect, body, line, cut)

    async def _work(self, asked: Asked, work: Callable[..., T], *args: Any) -> T:
        """Read and render: here, in a turn of its own, or aside when it would keep the others' pings waiting."""
        try:
            if asked.new_bytes > INLINE_BYTES:
                return await asyncio.get_running_loop().run_in_executor(self._aside, work, *args)
            await self._driver.turns.take()
            return work(*args)
        except RecursionError:
            raise Refusal("the body is nested too deeply") from None

    async def _whole(self, request: web.Request, dialect: Dialect, live: LiveCall, head: Head) -> web.StreamResponse:
        """One JSON body; blanks before it keep the client while it waits."""
        response: web.StreamResponse | None = None
        while not await live.wait(self._config.keepalive_s):
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                await response.prepare(request)
            await response.write(b" ")
        try:
            answer = dialect.body(head, _complete(await live.result(), live))
        except OpenGyreError as error:
            if response is None:
                raise
            answer = dialect.error(_as_refusal(error, live.session))
        body = compact(answer).encode("utf-8", "replace")
        if response is None:
            response = web.Response(body=body, content_type="application/json")
            await response.prepare(request)
            await response.write_eof()
        else:
            await response.write_eof(body)
        return response

    async def _stream(self, request: web.Request, emitter: Emitter, live: LiveCall) -> web.StreamResponse:
        """Server-sent events: the head at once, then pings (or deltas), then the recorded turn."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(emitter.open())
        asked, each = live.prepared.conversation, self._config.stream_tokens
        after = asked.messages[-1].role
        text = TextStream(self._driver.renderer, asked.stop_sequences, asked.thinking, after) if each else None
        seen, now = 0, asyncio.get_running_loop().time
        silent_since = now()
        while not live.done:
            due = silent_since + self._config.keepalive_s
            await live.wait(max(0.0, due - now()), since=seen if each else None)
            frames = b""
            if text is not None:
                fresh = live.sampled.ids[seen:]
                seen += len(fresh)
                frames = b"".join(emitter.delta(kind, piece) for kind, piece in text.feed(fresh))
            if not frames and not live.done and now() >= due:  # tokens may come and still release nothing
                frames = emitter.ping()
            if frames:
                await response.write(frames)
                silent_since = now()
        try:
            last = emitter.close(_complete(await live.result(), live))
        except OpenGyreError as error:
            last = emitter.fail(_as_refusal(error, live.session))
        await response.write_eof(last)
        return response


def _complete(reply: Reply, live: LiveCall) -> Reply:
    """A reply we cut ourselves is not the policy's turn and is not shown as one."""
    if reply.finish is Finish.ABORTED:
        raise Refusal("this execution has ended", status=409)
    return reply


def _keys(request: web.Request) -> list[str]:
    """Keys a client sent: it may fill either header, or both."""
    bearer = request.headers.get("Authorization", "")
    found = [bearer[7:].strip()] if bearer[:7].lower() == "bearer " else []
    return [*found, *filter(None, [request.headers.get("x-api-key")])]


def _as_refusal(error: OpenGyreError, session: Session | None) -> Refusal:
    """What the harness is told. Our own failures are "overloaded": it tries again, and learns nothing of cells."""
    if isinstance(error, Refusal):
        return error
    if session is not None and session.closed:
        return Refusal("this execution has ended", status=409)
    return Refusal("the model is not available right now", status=529, kind="overloaded_error")


def _refused(dialect: Dialect, refusal: Refusal, request: web.Request) -> web.Response:
    if "text/event-stream" in request.headers.get("Accept", "") and (events := dialect.refused_stream(refusal)):
        return web.Response(body=events, content_type="text/event-stream")
    # 4xx are final; without this some clients repeat a 409 for minutes.
    headers = {"x-should-retry": "false"} if refusal.status < 500 else {}
    body = compact(dialect.error(refusal)).encode("utf-8", "replace")
    response = web.Response(body=body, content_type="application/json", status=refusal.status, headers=headers)
    if request.content.exception() is not None or not request.content.at_eof():
        response.force_close()  # what is left of the body would be taken for the next request: the client is told
    return response
