"""A rollout engine that says what it is told to, and fails when it is told to. Implements ``RolloutEngine``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from opengyre.errors import EngineError
from opengyre.proxy.render import Renderer
from opengyre.rollout.base import EngineLoad, GenerateRequest, TokenChunk


async def until(condition: Callable[[], object]) -> None:
    """Wait until something observable is true; the test's own time limit is the only clock."""
    while not condition():  # noqa: ASYNC110  what is observed has no event of its own
        await asyncio.sleep(0.005)


def logprob(position: int) -> float:
    """The log-probability of a reply's token at ``position``: different for neighbours, so that shifts are seen."""
    return -((position % 7) + 1) / 8


@dataclass
class Script:
    """What the policy will say, shared by the engines of a test so that a moved call goes on where it was."""

    renderer: Renderer
    replies: list[str | list[int]] = field(default_factory=list)
    default: str = "ok"
    _plans: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def ids(self, request: GenerateRequest) -> tuple[int, list[int]]:
        """(position in the reply, what is left of it)."""
        call = request.call_id[:32]
        if call not in self._plans:
            reply = self.replies.pop(0) if self.replies else self.default
            ids = [*self.renderer.encode(reply), *self.renderer.stop_token_ids] if isinstance(reply, str) else reply
            self._plans[call] = (len(request.prompt_ids), ids)
        start, ids = self._plans[call]
        at = len(request.prompt_ids) - start
        return at, ids[at:]


class ScriptedEngine:
    """One serving cell of a test.

    Args:
        gate: each token waits for it; clear it to hold the engine.
        stop_after: end calls as ``stop_as`` after so many tokens: ``preempted``, ``aborted``, or ``dies``.
        refuses: raise EngineError at once.
        breaks_logprobs: send one log-probability too few with each chunk.
        pace_s: seconds between two chunks.
    """

    def __init__(self, name: str, script: Script, *, version: int = 0, chunk: int = 1) -> None:
        self.name, self.script, self.version, self.chunk = name, script, version, chunk
        self.gate = asyncio.Event()
        self.gate.set()
        self.stop_after: int | None = None
        self.stop_as = "preempted"
        self.refuses = False
        self.breaks_logprobs = False
        self.pace_s = 0.0
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.most_running = 0
        self.aborted: list[str] = []
        self.sampled = asyncio.Condition()
        self.tokens = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        if self.refuses:
            raise EngineError("is not serving", where=f"engine {self.name}")
        self.running.add(request.call_id)
        self.most_running = max(self.most_running, len(self.running))
        finished = False
        try:
            async for chunk in self._chunks(request):
                finished = chunk.finish is not None
                yield chunk
        finally:
            self.running.discard(request.call_id)
            if not finished:
                self.aborted.append(request.call_id)

    async def _chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        at, ids = self.script.ids(request)
        ends_by_itself = len(ids) <= request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        done = 0
        while done < len(ids):
            await self.gate.wait()
            if self.stop_after is not None and done >= self.stop_after:
                if self.stop_as == "dies":
                    raise EngineError("died", where=f"engine {self.name}")
                yield TokenChunk([], [], self.version, self.stop_as, kv={"from": self.name})
                return
            step = ids[done : done + self.chunk]
            logprobs = [logprob(at + done + i) for i in range(len(step))]
            if self.breaks_logprobs:
                logprobs = logprobs[:-1]
            done += len(step)
            last = done == len(ids)
            finish = ("stop" if ends_by_itself else "length") if last else None
            yield TokenChunk(step, logprobs, self.version, finish, cached_tokens=3)
            async with self.sampled:
                self.tokens += len(step)
                self.sampled.notify_all()
            await asyncio.sleep(self.pace_s)

    async def load(self) -> EngineLoad:
        return EngineLoad(len(self.running), 0, 0, self.version, not self.refuses)

    async def until_sampled(self, tokens: int) -> None:
        """Wait until the engine has handed out so many tokens in all."""
        async with self.sampled:
            await self.sampled.wait_for(lambda: self.tokens >= tokens)
