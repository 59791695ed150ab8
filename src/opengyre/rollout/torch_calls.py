"""A model call inside the embedded engine, what it has to say next, and the engine's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opengyre.errors import EngineError
from opengyre.rollout.base import GenerateRequest, TokenChunk


class KVExport(msgspec.Struct, frozen=True):
    """KV of a token prefix for another cell: ``arrays`` holds k0, v0, k1, v1, … of shape [kv heads, tokens, dim].

    Valid on ``version`` only. See ``torch_rows.to_arrays``.
    """

    ids: list[int]
    arrays: dict[str, Any]
    version: int


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the engine was built. ``prefill_tokens`` were computed, ``cached_tokens`` found instead."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    imported_tokens: int = 0
    imports_refused: int = 0  # another weights version, or arrays that do not fit the model
    retracted_calls: int = 0  # put back to the queue because KV memory ran out
    evicted_tokens: int = 0
    busy_s: float = 0.0


@dataclass(eq=False, slots=True)
class Call:
    """One call. ``ids`` is the prompt and everything sampled; ``pending`` has been sampled but not emitted.

    All pending tokens are of one weights version: a new version flushes them first.
    """

    request: GenerateRequest
    order: int  # of submission; the youngest call gives way when memory runs out
    seed: int
    ids: list[int]
    stops: frozenset[int]
    cached_tokens: int | None = None  # None until first admitted
    pending_ids: list[int] = field(default_factory=list)
    pending_logprobs: list[float] = field(default_factory=list)
    emitted: bool = False

    @property
    def sampled(self) -> int:
        """Tokens sampled by this engine for this call."""
        return len(self.ids) - len(self.request.prompt_ids)

    def add(self, token: int, logprob: float, limit: int) -> str | None:
        """Take a sampled token; the finish if it was the last. ``limit`` is the longest the call's ids may become."""
        self.ids.append(token)
        self.pending_ids.append(token)
        self.pending_logprobs.append(logprob)
        if token in self.stops:
            return "stop"
        return "length" if self.sampled >= self.request.max_new_tokens or len(self.ids) >= limit else None

    def chunk(self, version: int, finish: str | None = None) -> TokenChunk:
        """What is pending, as a message; pending is empty after."""
        first, self.emitted = not self.emitted, True
        ids, logprobs = self.pending_ids, self.pending_logprobs
        self.pending_ids, self.pending_logprobs = [], []
        return TokenChunk(ids, logprobs, version, finish, (self.cached_tokens or 0) if first else 0)


def check_request(request: GenerateRequest, *, limit: int, vocabulary: int, where: str) -> None:
    """Raise EngineError naming the figures if ``request`` can never be served by an engine of these sizes."""

    def refuse(what: str, right: str) -> None:
        raise EngineError(f"call {request.call_id}: {what}", where=where, right=right)

    prompt: Sequence[int] = request.prompt_ids
    if not prompt:
        refuse("the prompt is empty", "at least one token id")
    if len(prompt) >= limit:
        refuse(
            f"the prompt has {len(prompt)} tokens", f"at most {limit - 1}: min(context, kv_tokens) less one to sample"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        bad = next(i for i in prompt if not 0 <= i < vocabulary)
        refuse(f"token id {bad} is not in the vocabulary", f"0 to {vocabulary - 1}")
    if request.max_new_tokens < 1:
        refuse(f"max_new_tokens is {request.max_new_tokens}", "at least 1")
    if not request.temperature >= 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
        values = f"temperature {request.temperature}, top_p {request.top_p}, top_k {request.top_k}"
        refuse(values, "temperature >= 0, 0 < top_p <= 1, top_k >= 0")
