"""A policy that plays a part: it reads what it is asked and answers by that, never by the order of calls.

Sub-agents interleave, retries and compaction come when they come; so a part is a function of the prompt the engine was
given (``Ask``), and whatever is to go wrong with a call is part of the answer (``Say``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import policies
from engines import ScriptedEngine, logprob
from opengyre.errors import EngineError
from opengyre.proxy.render import Renderer
from opengyre.rollout.base import GenerateRequest, TokenChunk


@dataclass(frozen=True)
class Ask:
    """A prompt, read back from its token ids: (role, text) per message, and what the tools part says."""

    session: str
    messages: tuple[tuple[str, str], ...]
    tools: str

    @property
    def system(self) -> str:
        """The system prompt."""
        return next((text for role, text in self.messages if role == "system"), "")

    @property
    def task(self) -> str:
        """The first user message."""
        return next((text for role, text in self.messages if role == "user"), "")

    @property
    def last(self) -> str:
        """What came after the policy's last turn."""
        turns = [i for i, (role, _) in enumerate(self.messages) if role == "assistant"]
        return "\n".join(text for _, text in self.messages[turns[-1] + 1 if turns else 0 :])

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return sum(role == "assistant" for role, _ in self.messages)

    def __contains__(self, text: str) -> bool:
        return any(text in said for _, said in self.messages)


@dataclass
class Say:
    """An answer in the model's own format, and what happens on the way.

    ``role``: whose turn it is, which the script knows and role rules must find out; a plain string is the main agent's,
    None is not told.
    ``trouble``: (after so many tokens of this call, what) in order; what is ``dies``, ``preempted`` (its KV goes
    along), ``preempted_without_kv``, or a coroutine function awaited there with the engine (silence, a role switch).
    """

    text: str
    trouble: list[tuple[int, str | Callable[[ScriptedEngine], Awaitable[Any]]]] = field(default_factory=list)
    role: str | None = None


Part = Callable[[Ask], str | Say]


def thinks(thought: str, text: str = "") -> str:
    """A turn with reasoning before ``text``."""
    return f"<think>\n{thought}\n</think>\n\n{text}"


def calls(*tools: tuple[str, dict[str, Any]], text: str = "") -> str:
    """A turn that calls tools, in parallel if several."""
    blocks = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in tools
    ]
    return "\n".join([*([text] if text else []), *blocks])


class Player:
    """What the engines of a test say: ``part`` is asked once per model call, wherever the call then goes on.

    ``asked`` and ``said`` are kept in the order of first requests, ``roles`` by call id.
    """

    def __init__(self, renderer: Renderer, part: Part) -> None:
        self._renderer, self.part = renderer, part
        self._tokenizer = policies.tokenizer()  # the renderer's own decoding leaves out what separates messages
        self.asked: list[Ask] = []
        self.said: list[Say] = []
        self.roles: dict[str, str] = {}
        self._plans: dict[str, tuple[int, list[int], Say]] = {}

    def plan(self, request: GenerateRequest) -> tuple[int, list[int], Say]:
        """(position in the reply, ids that are left, the answer they are of)."""
        call = request.call_id[:32]
        if call not in self._plans:
            ask = self.read(request)
            said = self.part(ask)
            say = said if isinstance(said, Say) else Say(said, role="main")
            self.asked.append(ask)
            self.said.append(say)
            if say.role is not None:
                self.roles[call] = say.role
            ids = [*self._renderer.encode(say.text), *self._renderer.stop_token_ids]
            self._plans[call] = (len(request.prompt_ids), ids, say)
        start, ids, say = self._plans[call]
        at = len(request.prompt_ids) - start
        return at, ids[at:], say

    def read(self, request: GenerateRequest) -> Ask:
        """A prompt in the test template (policies.CHATML) as messages."""
        text = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        messages, tools = [], ""
        for piece in text.split("<|im_start|>")[1:-1]:  # the last one opens the answer
            role, _, said = piece.partition("\n")
            said = said.rstrip("\n").removesuffix("<|im_end|>")
            if not messages and role == "system" and said.startswith("# Tools"):
                tools = said
                continue
            messages.append((role, said))
        return Ask(request.session, tuple(messages), tools)


class PlayedEngine(ScriptedEngine):
    """One serving cell that says what the player says. Options of ScriptedEngine that break it work here too."""

    def __init__(self, name: str, player: Player, *, version: int = 0, chunk: int = 8) -> None:
        super().__init__(name, player, version=version, chunk=chunk)  # type: ignore[arg-type]
        self._player = player

    async def _chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        at, ids, say = self._player.plan(request)
        ends_by_itself = len(ids) <= request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        done = 0
        while done < len(ids):
            await self.gate.wait()
            if say.trouble and at + done >= say.trouble[0][0]:
                _, what = say.trouble.pop(0)
                if what == "dies":
                    raise EngineError("died", where=f"engine {self.name}")
                if isinstance(what, str):
                    kv = {"from": self.name} if what == "preempted" else None
                    yield TokenChunk([], [], self.version, "preempted", kv=kv)
                    return
                await what(self)
                continue
            stop = min(done + self.chunk, len(ids), *([say.trouble[0][0] - at] if say.trouble else []))
            step = ids[done : max(stop, done + 1)]
            logprobs = [logprob(at + done + i) for i in range(len(step))]
            done += len(step)
            finish = ("stop" if ends_by_itself else "length") if done == len(ids) else None
            yield TokenChunk(step, logprobs, self.version, finish, cached_tokens=3)
            async with self.sampled:
                self.tokens += len(step)
                self.sampled.notify_all()
            await asyncio.sleep(0)
