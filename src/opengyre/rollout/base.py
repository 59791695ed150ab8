"""The contract between the proxy and anything that samples tokens.

    proxy ── generate(request) ──▶ engine          token ids in
    proxy ◀─ TokenChunk, TokenChunk, …  ── engine  token ids and log-probabilities out, the last chunk has a finish

A call ends with ``preempted`` when its cell leaves the rollout role: the caller goes on elsewhere with
``prompt_ids + everything received so far``, and may hand over ``kv`` if both cells hold the same weights version.
Log-probabilities are natural logs of the distribution the token was drawn from, temperature included.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from opengyre.errors import EngineError
from opengyre.rollout.tokens import TokenIds

REGIONS = ("weights", "kv")  # what an engine can release; it serves only when all are back


class GenerateRequest(msgspec.Struct, frozen=True):
    """One model call, token-in.

    ``call_id`` is unique in the run and of fixed width (engines match aborts by prefix). ``session`` groups calls that
    share a prefix. ``kv`` is a reference another cell's engine exported, or None. ``greedy`` ignores the temperature.
    """

    call_id: str
    session: str
    prompt_ids: TokenIds
    max_new_tokens: int
    stop_token_ids: list[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    kv: dict[str, Any] | None = None


class TokenChunk(msgspec.Struct, frozen=True):
    """Tokens sampled since the last chunk, all on one weights version.

    ``finish`` is None (more to come), ``stop``, ``length``, ``preempted`` or ``aborted``. The stop token is part of
    ``ids``. ``kv`` is set on a preempted call whose KV was exported. ``cached_tokens`` is set on the first chunk.
    ``versions``, on a last chunk, are (version, tokens) runs over everything sampled for this request, in order, from
    an engine that says them only at the end; they replace what the chunks before said.
    """

    ids: list[int]
    logprobs: list[float]
    version: int
    finish: str | None = None
    cached_tokens: int = 0
    kv: dict[str, Any] | None = None
    versions: list[tuple[int, int]] | None = None


class RequestRefused(EngineError):
    """The engine will never take this request (it does not fit, it is malformed): going elsewhere is no help."""


class EngineLoad(msgspec.Struct, frozen=True):
    """What the router sees of an engine. Missing measurements are None, which never means idle."""

    running: int
    waiting: int
    kv_tokens: int
    version: int
    serving: bool


class RolloutEngine(Protocol):
    """A served policy, as the proxy's router sees it."""

    name: str

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a call's tokens. Closing the iterator aborts the call.

        Raises:
            RequestRefused: it would refuse this request always.
            EngineError: the engine refuses (it is not serving) or died; tokens yielded before stay valid.
        """
        ...

    async def load(self) -> EngineLoad:
        """Current load. Raises EngineError if the engine is gone."""
        ...
