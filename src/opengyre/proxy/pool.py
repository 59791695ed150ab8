"""The servers behind a proxy of its own: in the balancer exactly while they are up and can be used.

    DOWN ──▶ answers? ──▶ describe, check log-probabilities ──▶ UP: router.add          asked every ``POLL_S``
     ▲                          │ cannot be used                  │ silent MISSES times in a row
     │                          ▼                                 ▼
     └───────────────────── REFUSED, with the reason        router.remove, calls abandoned: they go on elsewhere

One task per server; nobody waits for it but ``ready``. A server that comes back is looked at afresh, for it may have
been started with other options. Calls that fail meanwhile need nothing from here: the router suspects their server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from opengyre.errors import ConfigError, EngineError
from opengyre.proxy.render import Renderer
from opengyre.proxy.router import Router
from opengyre.rollout.http import EngineFacts, HttpEngine
from opengyre.rollout.http_check import Logprobs, check_logprobs

POLL_S = 5.0  # a hung server's calls move within MISSES of these
MISSES = 3  # a busy server may miss one health check, hardly three
CHECK_TEXTS = ("The quick brown fox", "def main(", "1, 2, 3,")  # any text does; a model is rarely flat on all of them


class State(StrEnum):
    """Of one server."""

    DOWN = "down"  # does not answer
    UP = "up"  # in the balancer
    REFUSED = "refused"  # answers, but what it samples could not be recorded


@dataclass(eq=False)
class _Member:
    engine: HttpEngine
    state: State = State.DOWN
    why: str = "not asked yet"
    logprobs: Logprobs = Logprobs.UNKNOWN


class Pool:
    """Watches servers and puts them into the balancer.

    Args:
        engines: the servers.
        router: the balancer.
        renderer: of the policy; its ``context`` is what a server must take.
        temperature: that calls are sampled with unless their session says otherwise.
        slots: calls one server gets at once.
        say: told, in a line, of every change.
        fit_context: until a server is up, the renderer's ``context`` is lowered to what a server takes.
    """

    def __init__(
        self,
        engines: Sequence[HttpEngine],
        router: Router,
        renderer: Renderer,
        *,
        temperature: float,
        slots: int,
        say: Callable[[str], None],
        poll_s: float = POLL_S,
        fit_context: bool = False,
    ) -> None:
        self._members = [_Member(engine) for engine in engines]
        self._router, self._renderer, self._say = router, renderer, say
        self._temperature, self._slots, self._poll_s = temperature, slots, poll_s
        self._fit_context = fit_context
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()

    async def start(self, wait_s: float) -> None:
        """Begin to watch; returns when a server is up.

        Raises:
            ConfigError: none was within ``wait_s``, or one answers that cannot be used; says why for each.
        """
        self._tasks = [asyncio.create_task(self._watch(m), name=f"watch {m.engine.name}") for m in self._members]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: any(m.state is not State.DOWN for m in self._members))
        bad = [m for m in self._members if m.state is State.REFUSED]
        if not bad and any(m.state is State.UP for m in self._members):
            return
        reasons = "; ".join(f"{m.engine.url} {m.why}" for m in bad or self._members)
        raise ConfigError(reasons, where="--engine", right=None if bad else "a running SGLang or vLLM server")

    async def close(self) -> None:
        """Watch no more, close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            await member.engine.close()

    def tell_version(self, version: int) -> None:
        """The weights are ``version`` now, for servers that do not say so themselves."""
        for member in self._members:
            member.engine.version = version

    def allows(self, temperature: float) -> str | None:
        """Why no session may sample at this temperature; None if it may."""
        if temperature == 1.0:
            return None
        raw = [m for m in self._members if m.logprobs is Logprobs.BEFORE_TEMPERATURE and m.state is State.UP]
        return f"{raw[0].engine.url}: {_raw(raw[0].engine.kind)}" if raw else None

    def status(self) -> list[dict[str, Any]]:
        """What is known of each server, as plain data."""
        return [
            {
                "name": m.engine.name,
                "url": m.engine.url,
                "kind": m.engine.kind,
                "state": m.state.value,
                "why": m.why,
                "running": len(self._router.running(m.engine.name)),
                "version": m.engine.version,
                "logprobs": m.logprobs.value,
                "notes": list(m.engine.facts.notes) if m.engine.facts else [],
            }
            for m in self._members
        ]

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _watch(self, member: _Member) -> None:
        misses = 0
        while True:
            try:
                if member.state is State.UP:
                    await member.engine.load()
                else:
                    await self._admit(member)
                misses = 0
            except EngineError as error:
                misses += 1
                if member.state is not State.UP or misses >= MISSES:
                    await self._to(member, State.DOWN, str(error))
            await asyncio.sleep(self._poll_s)

    async def _admit(self, member: _Member) -> None:
        """Look at a server that answers; put it into the balancer, or say why not."""
        await member.engine.load()
        facts = await member.engine.describe()
        if why_not := await self._other_tokens(member.engine):
            await self._to(member, State.REFUSED, why_not)  # before anything is sampled: an id too high kills SGLang
            return
        member.logprobs = await check_logprobs(member.engine, [self._renderer.encode(text) for text in CHECK_TEXTS])
        if self._fit_context and facts.context is not None:
            self._renderer.context = min(self._renderer.context, facts.context)
        why_not = self._why_not(member, facts)
        if why_not is not None:
            await self._to(member, State.REFUSED, why_not)
            return
        await self._to(member, State.UP, f"serves {facts.model}, log-probabilities {member.logprobs.value}")
        for note in facts.notes:
            self._say(f"engine {member.engine.name}: {note}")

    async def _other_tokens(self, engine: HttpEngine) -> str | None:
        """Does the server know another tokenizer than ours? None if it does not, or does not say."""
        for text in CHECK_TEXTS:
            theirs, ours = await engine.encode(text), self._renderer.encode(text)
            if theirs is not None and theirs != ours:
                return f"writes {text!r} as {theirs}, --model as {ours}: give the folder that it serves"
        return None

    def _why_not(self, member: _Member, facts: EngineFacts) -> str | None:
        context = self._renderer.context
        if facts.context is not None and facts.context < context:
            return f"takes {facts.context} tokens, not the {context} promised: start with --context {facts.context}"
        if member.logprobs is Logprobs.NOT_NORMALISED:
            return "reports logits, not log-probabilities: start it with --logprobs-mode processed_logprobs"
        if member.logprobs is Logprobs.BEFORE_TEMPERATURE and self._temperature != 1.0:
            return f"at temperature {self._temperature} {_raw(member.engine.kind)}"
        return None

    async def _to(self, member: _Member, state: State, why: str) -> None:
        news = state is not member.state or (state is State.REFUSED and why != member.why)
        member.state, member.why = state, why
        if state is State.UP:
            self._fit_context = False  # from here on calls are measured by it
            self._router.add(member.engine, self._slots)
        else:
            self._router.remove(member.engine.name)
            member.engine.abandon(why)
        if news:
            self._say(f"engine {member.engine.name} ({member.engine.url}) is {state.value}: {why}")
        async with self._changed:
            self._changed.notify_all()


def _raw(kind: str) -> str:
    """What is wrong with log-probabilities before temperature, and which option mends it."""
    option = "--logprobs-mode processed_logprobs" if kind == "vllm" else "SGLANG_RETURN_ORIGINAL_LOGPROB unset"
    return f"its log-probabilities, taken before temperature, are not those of what it samples: start it with {option}"
