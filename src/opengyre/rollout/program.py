"""A rollout engine whose policy is a program: it reads the conversation as text and says what it decides.

    prompt ids ──▶ turns (cut at the stop tokens, decoded) ──▶ program ──▶ text ──▶ ids + stop token, one chunk

For demonstrations recorded through the real proxy from a real harness, and for whatever else should act in a policy's
place without weights. The program's own probability is recorded: the log-probability of everything it decided stands on
the reply's first token, the rest follows with certainty.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import NamedTuple, Protocol

from opengyre.errors import EngineError, boundary
from opengyre.proxy.render import Renderer
from opengyre.rollout.base import EngineLoad, GenerateRequest, TokenChunk


class Said(NamedTuple):
    """One reply: what the policy would write before its stop token, and the log-probability of having chosen it."""

    text: str
    logprob: float = 0.0


class Program(Protocol):
    """A policy as a function of the visible conversation."""

    def __call__(self, turns: Sequence[str], random: Random) -> Said:
        """The next reply.

        ``turns`` are the decoded stretches between stop tokens (one a message, special tokens left out), the last one
        the generation prompt. All chance must come from ``random``, so that a run can be repeated.
        """
        ...


class ProgramEngine:
    """Implements ``RolloutEngine``. Chance depends on the seed, the session and the place in it, not on timing."""

    def __init__(self, renderer: Renderer, program: Program, *, seed: int = 0, name: str = "program") -> None:
        if not renderer.stop_token_ids:
            raise EngineError("the model folder names no token that ends a turn", where=f"engine {name}")
        self.name, self._renderer, self._program, self._seed = name, renderer, program, seed
        self._stop = renderer.stop_token_ids[0]
        self._running = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The whole reply in one chunk, cut at ``max_new_tokens``. Raises EngineError if the program does."""
        self._running += 1
        try:
            with boundary(EngineError, f"engine {self.name}"):
                random = Random(f"{self._seed}/{request.session}/{len(request.prompt_ids)}")
                said = self._program(self._turns(request.prompt_ids), random)
            ids = [*self._renderer.encode(said.text), self._stop]
            cut = ids[: request.max_new_tokens]
            finish = "stop" if len(cut) == len(ids) else "length"
            yield TokenChunk(cut, [said.logprob, *[0.0] * (len(cut) - 1)], 0, finish)
        finally:
            self._running -= 1

    def _turns(self, ids: Sequence[int]) -> list[str]:
        turns, start = [], 0
        for place, token in enumerate(ids):
            if token == self._stop:
                turns.append(self._renderer.decode(ids[start:place]))
                start = place + 1
        return [*turns, self._renderer.decode(ids[start:])]

    async def load(self) -> EngineLoad:
        """Programs answer at once and never leave."""
        return EngineLoad(self._running, 0, 0, 0, serving=True)
