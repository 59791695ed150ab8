"""What was said, token by token.

Thesis: every token belongs to exactly one span, and a span has one provenance. A *prompt* span was written by the
harness and is never trained. A *sampled* span was written by the policy and carries one log-probability per token, the
weights version and the cell that sampled it. ``len(ids) == len(logprobs)`` is asserted here, where a span is made;
nothing downstream can produce a trainable token any other way.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from opengyre.errors import RecordError

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class Role(StrEnum):
    """Role of a leaf, in the order in which selection prefers them (SPEC §4.2)."""

    MAIN = "main"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT = "sub_agent"
    SUB_AGENT_SUMMARY = "sub_agent_summary"


class Finish(StrEnum):
    """Why a model call ended."""

    STOP = "stop"  # the policy ended its turn
    STOP_SEQUENCE = "stop_sequence"  # a stop string the harness asked for
    LENGTH = "length"  # max_tokens or the context limit
    ABORTED = "aborted"  # the harness went away


class Span(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A run of tokens of one provenance.

    Args:
        ids: shape (T,), token ids as the engine saw or sampled them.
        logprobs: shape (T,), natural log of the probability with which each token was sampled (after temperature);
            ``None`` for a prompt span.
        version: weights version that sampled it; ``None`` for a prompt span.
        cell: name of the cell that sampled it; ``None`` for a prompt span.
        trainable: False for sampled tokens that are kept but must not be trained (a gap in the log-probabilities, a
            reply that was never delivered).
    """

    ids: Ids
    logprobs: Logprobs | None = None
    version: int | None = None
    cell: str | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.ids.dtype != np.int32 or self.ids.ndim != 1:
            raise RecordError(f"span ids are {self.ids.dtype} {self.ids.shape}", right="a 1-d int32 array")
        if self.logprobs is None:
            if self.version is not None or self.cell is not None:
                raise RecordError("a span without log-probabilities names a version or a cell")
            return
        if len(self.ids) != len(self.logprobs):
            raise RecordError(f"{len(self.ids)} sampled ids with {len(self.logprobs)} log-probabilities")
        if self.version is None or self.cell is None:
            raise RecordError("a sampled span needs its weights version and its cell")
        if self.trainable and not bool(np.isfinite(self.logprobs).all()):
            raise RecordError("a trainable span has a log-probability that is not finite")

    @property
    def sampled(self) -> bool:
        """True if the policy wrote these tokens."""
        return self.logprobs is not None

    def __len__(self) -> int:
        return len(self.ids)


class CallMeta(msgspec.Struct, frozen=True, gc=False):
    """What is known of a model call besides its tokens. Times are seconds on the run's clock.

    ``dialect`` is ``messages``, ``chat`` or ``responses``; ``headers`` are the few request headers that role rules read
    (lower-case names); ``tool_names`` and ``system_head`` (first 200 characters) likewise; ``asked`` is the first 400
    characters of the last user message, ``asked_tail`` its last text block's first 400 characters.
    """

    call_id: str
    dialect: str
    started_s: float
    ended_s: float
    finish: Finish
    delivered: bool
    cached_tokens: int = 0
    moves: int = 0  # how often the call went on at another cell
    fork_reason: str | None = None
    headers: dict[str, str] = {}
    tool_names: tuple[str, ...] = ()
    system_head: str = ""
    asked: str = ""
    asked_tail: str = ""
    pins: dict[str, float] = {}
