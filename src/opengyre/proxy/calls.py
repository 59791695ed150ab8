"""The call driver: one model call from request to record.

    request ─▶ restore, match ─▶ render tail ─▶ fits? ─▶ route ─▶ generate ─▶ commit ─▶ last bytes
                                                 no│       ▲          │
                                               400 ▼       └──────────┘ preempted, refused, died: go on elsewhere from
                                                                       prompt + tokens received, with their KV

A call runs in a task of its own. Handlers join and leave it: a re-send joins the running call instead of starting a
second one, and when the last handler has been gone for ``LINGER_S`` the engine is aborted and what was sampled is
committed as undelivered. Readers are woken by every chunk and by the end; ``reply`` is set only when the call is
durable, so nothing that ends a call can be written before it is recorded.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import numpy as np

from opengyre.errors import EngineError, OpenGyreError, boundary
from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall, ToolResult
from opengyre.proxy.lines import skeleton
from opengyre.proxy.render import Renderer
from opengyre.proxy.reply import Reply, Turn, mint_for, signature
from opengyre.proxy.request import Prepared
from opengyre.proxy.router import Lease, Router
from opengyre.proxy.sampled import Sampled
from opengyre.proxy.session import Session, Sessions
from opengyre.proxy.stream import StopWatch
from opengyre.proxy.turns import Turns
from opengyre.record.call import CommittedCall, digest_ids
from opengyre.record.types import CallMeta, Finish, Ids
from opengyre.rollout.base import GenerateRequest, RequestRefused
from opengyre.rollout.tokens import TokenIds

LINGER_S = 0.5  # a client's fallback re-sends at once, its retry after 0.5 s; the engine must be free within 1 s
LOST_REPLIES = 4  # replies kept because their delivery failed; at most one per parallel agent is asked for again


@dataclass(eq=False)
class LiveCall:
    """A call under way, or just answered."""

    call_id: str
    identity: bytes  # of the request
    prepared: Prepared
    session: Session
    started_s: float
    sampled: Sampled = field(default_factory=Sampled)
    reply: Reply | None = None
    failure: OpenGyreError | None = None
    moves: int = 0
    readers: int = 0
    aborted: bool = False
    _sampling: asyncio.Task[None] | None = None
    _waiting: dict[asyncio.Future[None], bool] = field(default_factory=dict)  # True: woken by each chunk

    @property
    def done(self) -> bool:
        """True once ``reply`` or ``failure`` is set."""
        return self.reply is not None or self.failure is not None

    async def wait(self, seconds: float | None = None, *, since: int | None = None) -> bool:
        """Wait for the end, for more than ``since`` tokens, or so long at most. Returns ``done``."""
        if not self.done and (since is None or len(self.sampled) <= since):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting[future] = since is not None
            timer = None if seconds is None else loop.call_later(seconds, _set, future)
            try:
                await future
            finally:
                self._waiting.pop(future, None)
                if timer is not None:
                    timer.cancel()
        return self.done

    async def result(self) -> Reply:
        """Wait for the end. Raises what kept the call from being recorded."""
        await self.wait()
        if self.failure is not None:
            raise self.failure
        assert self.reply is not None
        return self.reply

    def abort(self) -> None:
        """End the sampling; what was sampled is recorded. A call that has ended is left alone."""
        self.aborted = True
        if self._sampling is not None:
            self._sampling.cancel()

    @contextmanager
    def abortable(self) -> Iterator[None]:
        """Here ``abort`` cancels the task that runs the call, and nowhere else."""
        self._sampling = asyncio.current_task()
        try:
            yield
        finally:
            self._sampling = None

    def wake(self) -> None:
        """Wake those who wait for tokens, or everybody at the end."""
        for future, each in list(self._waiting.items()):
            if each or self.done:
                _set(future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class CallDriver:
    """Runs the calls of all sessions.

    Args:
        renderer: of the policy.
        router: over the engines that serve.
        sessions: whose store makes calls durable.
        clock: seconds on the run's clock, for ``CallMeta``.
    """

    def __init__(
        self, renderer: Renderer, router: Router, sessions: Sessions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.renderer, self.router, self.sessions = renderer, router, sessions
        self.turns = Turns()
        self._clock = clock
        self._running: dict[asyncio.Task[None], LiveCall] = {}
        self._stopped = False
        sessions.on_end(self._end_session)

    # -- handlers come and go ----------------------------------------------------------------------------------------

    async def start(self, session: Session, prepared: Prepared) -> LiveCall:
        """Join the running call of the same request, take up a reply that was lost on its way, or begin.

        The caller must ``leave`` the call when it is done with it. Raises Refusal when the session takes no more calls,
        EngineError when the run is ending.
        """
        if self._stopped:
            raise EngineError("the run is ending", where="proxy")
        identity = prepared.identity
        while (live := session.live.get(identity)) is not None and live.aborted:
            await live.wait()  # never two generations of one request
        if live is None:
            live = session.lost.pop(identity, None)
        if live is not None:
            session.counters.joined += 1
            live.readers += 1
            return live
        session.admit()
        live = LiveCall(uuid.uuid4().hex, identity, prepared, session, self._clock(), readers=1)
        session.live[identity] = live
        task = asyncio.create_task(self._run(live), name=f"call {live.call_id}")
        self._running[task] = live
        task.add_done_callback(self._running.pop)
        return live

    def leave(self, live: LiveCall, *, answered: bool) -> None:
        """A handler is done with ``live``; ``answered``: its last byte went out."""
        live.readers -= 1
        if not answered and not live.readers:
            asyncio.get_running_loop().call_later(LINGER_S, self._abandon, live)

    def _abandon(self, live: LiveCall) -> None:
        if live.readers:
            return
        if not live.done:
            live.abort()
        elif live.reply is not None and live.reply.delivered and not live.session.closed:
            lost = live.session.lost  # recorded as delivered, then the connection broke: the re-send gets this reply
            lost[live.identity] = live
            while len(lost) > LOST_REPLIES:
                del lost[next(iter(lost))]

    def _end_session(self, session: Session) -> None:
        for live in session.live.values():
            live.abort()
        session.lost.clear()
        self.router.forget(session.execution_id)

    async def stop(self) -> None:
        """Take no more calls and end all that run; what was sampled is recorded. Returns when nothing runs."""
        self._stopped = True
        for live in self._running.values():
            live.abort()
        if self._running:
            await asyncio.wait(set(self._running))

    # -- one call ----------------------------------------------------------------------------------------------------

    async def _run(self, live: LiveCall) -> None:
        try:
            with boundary(EngineError, f"call {live.call_id}"):
                finish = await self._sample_or_abort(live)
                await self._record(live, finish)
        except OpenGyreError as error:
            live.failure = error
        finally:
            if not live.done:
                live.failure = EngineError("ended without a reply", where=f"call {live.call_id}")
            del live.session.live[live.identity]
            live.wake()

    async def _sample_or_abort(self, live: LiveCall) -> Finish:
        try:
            with live.abortable():
                return Finish.ABORTED if live.aborted else await self._sample(live)
        except asyncio.CancelledError:
            if not live.aborted:
                raise  # the loop itself is ending
            cast(asyncio.Task, asyncio.current_task()).uncancel()
            return Finish.ABORTED

    async def _sample(self, live: LiveCall) -> Finish:
        """Sample to the end, at one engine after the other if need be."""
        conversation = live.prepared.conversation
        last = conversation.messages[-1].role
        watch = StopWatch(self.renderer, conversation.stop_sequences, conversation.thinking, last)
        kv: dict[str, Any] | None = None
        for attempt in count():
            if len(live.sampled) >= live.prepared.max_new_tokens:
                break
            with live.session.held.hold():
                lease = await self.router.acquire(live.session.execution_id, live.call_id)
            had, refused = len(live.sampled), False
            finish: Finish | None = Finish.ABORTED  # if we are cancelled
            try:
                finish, kv = await self._at(lease, self._request(live, kv, attempt), live, watch)
            except RequestRefused:
                raise  # by any engine, always
            except OpenGyreError:
                finish, kv = None, None  # refused, died, or could not take the KV; what it sent before stays valid
                refused = len(live.sampled) == had
            finally:
                # An engine that ends calls without a token is left alone for a moment, whatever it says.
                lease.release(failed=finish is None and len(live.sampled) == had)
            if finish is not None:
                return finish
            live.moves += not refused
        return Finish.LENGTH

    async def _at(
        self, lease: Lease, request: GenerateRequest, live: LiveCall, watch: StopWatch
    ) -> tuple[Finish | None, dict[str, Any] | None]:
        """Sample at one engine. Returns (finish, None), or (None, KV reference) when the call must go on elsewhere."""
        chunks = cast(AsyncGenerator, lease.engine.generate(request))
        with boundary(EngineError, f"engine {lease.engine.name}"):
            async with aclosing(chunks):
                async for chunk in chunks:
                    live.sampled.add(chunk, lease.engine.name)
                    live.wake()
                    ids = live.sampled.ids
                    if watch.hit(ids, len(chunk.ids)):
                        return Finish.STOP_SEQUENCE, None
                    if chunk.finish == "stop" or (ids and ids[-1] in self.renderer.stop_token_ids):
                        return Finish.STOP, None
                    if chunk.finish == "length":
                        return Finish.LENGTH, None
                    if chunk.finish is not None:
                        return None, chunk.kv  # preempted, or aborted by somebody who is not the harness
        return None, None

    def _request(self, live: LiveCall, kv: dict[str, Any] | None, attempt: int) -> GenerateRequest:
        prepared, pins = live.prepared, live.session.pins
        return GenerateRequest(
            call_id=f"{live.call_id}{attempt:04x}",  # an engine met again must not take it for the earlier one
            session=live.session.execution_id,
            prompt_ids=_prompt(live),
            max_new_tokens=prepared.max_new_tokens - len(live.sampled),
            stop_token_ids=self.renderer.stop_token_ids,
            temperature=pins.temperature,
            top_p=pins.top_p,
            top_k=pins.top_k,
            kv=kv,
        )

    async def _record(self, live: LiveCall, finish: Finish) -> None:
        """Commit, then set ``reply``. A call that sampled nothing because it was aborted leaves no trace."""
        session, prepared = live.session, live.prepared
        if finish is Finish.ABORTED and not len(live.sampled):
            raise EngineError("was aborted before its first token", where=f"call {live.call_id}")
        turn = self._turn(live, finish)
        delivered = finish is not Finish.ABORTED and live.readers > 0
        self._count(live, turn, finish, delivered)
        ids = np.asarray(live.sampled.ids, np.int32)
        call = CommittedCall(
            attach=prepared.attach,
            tail_ids=prepared.tail_ids,
            marks=prepared.marks,
            sampled=live.sampled.spans(trainable=prepared.conversation.max_tokens != 1),  # 1: a client's token probe
            reply_key=keys.extend(prepared.key, turn.message),
            meta=self._meta(live, finish, delivered),
            prompt_digest=prepared.prompt.digest,
            sampled_digest=digest_ids(ids),
            usable=live.sampled.usable,
        )
        new = [*prepared.conversation.messages[prepared.attach.n_messages :], turn.message]
        await asyncio.wrap_future(self.sessions.store.submit(session.execution_id, call, list(map(plain, new))))
        await self.turns.take()  # calls that shared a transaction are not all answered in one turn of the loop
        session.tree.commit(call)
        session.history.remember(prepared.key, turn.message, delivered=delivered)
        self._keep_line(live, ids)
        live.reply = Reply(live.call_id, turn, finish, prepared.prompt.depth, len(live.sampled), delivered)

    def _keep_line(self, live: LiveCall, sampled: Ids) -> None:
        """Let the next request of this history be read on from here."""
        request, session = live.prepared.request, live.session
        line = request.line
        if line is None or line.epoch != session.history.epoch or session.closed:
            return
        messages = (*line.messages[: request.known], *map(skeleton, line.messages[request.known :]))
        path = live.prepared.prompt.extended(sampled, via=live.call_id)
        kept = replace(line, messages=messages, path=path)
        self.sessions.lines.keep(session.execution_id, kept, instead=request.grown_from)

    def _turn(self, live: LiveCall, finish: Finish) -> Turn:
        conversation = live.prepared.conversation
        turn = self.renderer.parse(
            live.sampled.ids,
            finish.value,
            thinking=conversation.thinking,
            after=conversation.messages[-1].role,
            tools=conversation.tools,
            stop=conversation.stop_sequences,
            mint=mint_for(live.call_id),
        )
        signed = (Thinking(p.text, signature(live.call_id)) if isinstance(p, Thinking) else p for p in turn.parts)
        return replace(turn, parts=tuple(signed))

    def _count(self, live: LiveCall, turn: Turn, finish: Finish, delivered: bool) -> None:
        counters = live.session.counters
        counters.calls += 1
        counters.moves += live.moves
        counters.undelivered += not delivered
        counters.truncated += finish is Finish.LENGTH
        counters.malformed_calls += turn.malformed
        counters.token_id_gap += live.sampled.gaps
        counters.logprob_gap += live.sampled.not_finite
        counters.placeholders += live.prepared.conversation.extra.get("placeholders", 0)

    def _meta(self, live: LiveCall, finish: Finish, delivered: bool) -> CallMeta:
        prepared, pins = live.prepared, live.session.pins
        note = prepared.request.note
        return CallMeta(
            call_id=live.call_id,
            dialect=prepared.dialect,
            started_s=live.started_s,
            ended_s=self._clock(),
            finish=finish,
            delivered=delivered,
            cached_tokens=live.sampled.cached_tokens,
            moves=live.moves,
            fork_reason=prepared.attach.fork_reason,
            headers=prepared.headers,
            tool_names=tuple(tool.name for tool in prepared.conversation.tools),
            system_head=note.system_head or "",
            asked=note.asked,
            asked_tail=note.asked_tail,
            pins={"temperature": pins.temperature, "max_new_tokens": float(prepared.max_new_tokens)},
        )


def _prompt(live: LiveCall) -> TokenIds:
    """What an engine is to go on from."""
    prompt = live.prepared.prompt
    if not live.sampled.ids:
        return prompt.tokens
    return TokenIds(np.concatenate([prompt.ids, np.asarray(live.sampled.ids, np.int32)]))


def plain(message: Message) -> dict[str, Any]:
    """A message for people to read, as stored beside its tokens."""
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        match part:
            case Text(text):
                parts.append({"text": text})
            case Thinking(text, _):
                parts.append({"thinking": text})
            case ToolCall(_, name, arguments):
                parts.append({"call": name, "arguments": arguments})
            case ToolResult(_, text, is_error):
                parts.append({"result": text, "is_error": is_error})
    return {"role": message.role, "parts": parts}
