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
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import numpy as np

from opengyre.errors import EngineError, OpenGyreError, boundary
from opengyre.proxy import keys
from opengyre.proxy.conversation import Message, Text, Thinking, ToolCall, ToolResult
from opengyre.proxy.render import Renderer
from opengyre.proxy.reply import Reply, Turn, signature
from opengyre.proxy.request import Prepared
from opengyre.proxy.router import Lease, Router
from opengyre.proxy.sampled import Sampled
from opengyre.proxy.session import Session, Sessions
from opengyre.proxy.stream import StopWatch
from opengyre.record.call import CommittedCall, digest_ids
from opengyre.record.types import CallMeta, Finish
from opengyre.rollout.base import GenerateRequest, RequestRefused

LINGER_S = 0.5  # a client's fallback re-sends at once, its retry after 0.5 s; the engine must be free within 1 s
LOST_REPLIES = 4  # replies kept because their delivery failed; at most one per parallel agent is asked for again
SYSTEM_CHARS, ASKED_CHARS = 200, 400  # as CallMeta says


@dataclass(eq=False)
class LiveCall:
    """A call under way, or just answered."""

    call_id: str
    prepared: Prepared
    session: Session
    started_s: float
    sampled: Sampled = field(default_factory=Sampled)
    reply: Reply | None = None
    failure: OpenGyreError | None = None
    moves: int = 0
    readers: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """True once ``reply`` or ``failure`` is set."""
        return self.reply is not None or self.failure is not None

    async def progress(self, since: int) -> None:
        """Wait until more than ``since`` tokens were sampled, or the end."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.done or len(self.sampled) > since)

    async def result(self) -> Reply:
        """Wait for the end. Raises what kept the call from being recorded."""
        await self.ended.wait()
        if self.reply is None:
            raise self.failure or EngineError("ended without a reply", where=f"call {self.call_id}")
        return self.reply


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
        while (live := session.live.get(identity)) is not None and live.abort.is_set():
            await live.ended.wait()  # never two generations of one request
        if live is None:
            live = session.lost.pop(identity, None)
        if live is not None:
            session.counters.joined += 1
            live.readers += 1
            return live
        session.admit()
        live = LiveCall(uuid.uuid4().hex, prepared, session, self._clock(), readers=1)
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
            live.abort.set()
        elif live.reply is not None and live.reply.delivered and not live.session.closed:
            lost = live.session.lost  # recorded as delivered, then the connection broke: the re-send gets this reply
            lost[live.prepared.identity] = live
            while len(lost) > LOST_REPLIES:
                del lost[next(iter(lost))]

    def _end_session(self, session: Session) -> None:
        for live in session.live.values():
            live.abort.set()
        session.lost.clear()
        self.router.forget(session.execution_id)

    async def settled(self, session: Session) -> None:
        """Wait until no call of a session runs; after ``Sessions.close`` its tree is final then."""
        while session.live:
            await next(iter(session.live.values())).ended.wait()

    async def stop(self) -> None:
        """Take no more calls and end all that run; what was sampled is recorded. Returns when nothing runs."""
        self._stopped = True
        for live in self._running.values():
            live.abort.set()
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
            del live.session.live[live.prepared.identity]
            live.ended.set()
            async with live.changed:
                live.changed.notify_all()

    async def _sample_or_abort(self, live: LiveCall) -> Finish:
        sampling = asyncio.create_task(self._sample(live))
        aborting = asyncio.create_task(live.abort.wait())
        try:
            await asyncio.wait({sampling, aborting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborting.cancel()
            sampling.cancel()  # no-op if it has ended; closes the engine's stream otherwise
            await asyncio.wait({sampling})
        return Finish.ABORTED if sampling.cancelled() else sampling.result()

    async def _sample(self, live: LiveCall) -> Finish:
        """Sample to the end, at one engine after the other if need be."""
        conversation = live.prepared.conversation
        watch = StopWatch(self.renderer, conversation.stop_sequences, conversation.thinking)
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
                    async with live.changed:
                        live.changed.notify_all()
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
            prompt_ids=[*prepared.prompt_ids.tolist(), *live.sampled.ids],
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
        call = CommittedCall(
            attach=prepared.attach,
            tail_ids=prepared.tail_ids,
            marks=prepared.marks,
            sampled=live.sampled.spans(trainable=prepared.conversation.max_tokens != 1),  # 1: a client's token probe
            reply_key=keys.extend(prepared.keys[-1], turn.message),
            meta=self._meta(live, finish, delivered),
            prompt_digest=digest_ids(prepared.prompt_ids),
            sampled_digest=digest_ids(np.asarray(live.sampled.ids, np.int32)),
            usable=live.sampled.usable,
        )
        new = [*prepared.conversation.messages[prepared.attach.n_messages :], turn.message]
        plain = [_plain(message) for message in new]
        await asyncio.to_thread(self.sessions.store.put, session.execution_id, call, plain)
        session.tree.commit(call)
        session.history.remember(prepared.keys[-1], turn.message, delivered=delivered)
        live.reply = Reply(live.call_id, turn, finish, len(prepared.prompt_ids), len(live.sampled), delivered)

    def _turn(self, live: LiveCall, finish: Finish) -> Turn:
        conversation = live.prepared.conversation
        turn = self.renderer.parse(
            live.sampled.ids,
            finish.value,
            thinking=conversation.thinking,
            tools=conversation.tools,
            stop=conversation.stop_sequences,
        )
        signed = (replace(p, signature=signature(live.call_id)) if isinstance(p, Thinking) else p for p in turn.parts)
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
        messages = prepared.conversation.messages
        system = next((m.text for m in messages if m.role == "system"), "")
        asked = next((m for m in reversed(messages) if m.role == "user"), Message("user", ()))
        blocks = [p.text for p in asked.parts if isinstance(p, Text)]
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
            system_head=system[:SYSTEM_CHARS],
            asked=asked.text[:ASKED_CHARS],
            asked_tail=blocks[-1][:ASKED_CHARS] if blocks else "",
            pins={"temperature": pins.temperature, "max_new_tokens": float(prepared.max_new_tokens)},
        )


def _plain(message: Message) -> dict[str, Any]:
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
