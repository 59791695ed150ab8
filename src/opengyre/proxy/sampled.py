"""What an engine returned for one call, chunk by chunk, with nothing invented.

Ids without as many finite log-probabilities are kept and counted, as NaN, and cannot be trained; a number is never put
in the place of a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from opengyre.record.types import Span
from opengyre.rollout.base import TokenChunk


@dataclass(slots=True)
class _Run:
    """Chunks in a row of one weights version and one cell."""

    version: int
    cell: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """The reply so far. ``gaps`` counts chunks whose ids and log-probabilities differ in number."""

    gaps: int = 0
    not_finite: int = 0
    cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)  # all of them, in order
    _runs: list[_Run] = field(default_factory=list)

    def add(self, chunk: TokenChunk, cell: str) -> None:
        """Take in a chunk sampled by ``cell``."""
        if not self._runs:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if chunk.ids or chunk.logprobs:
            self._append(chunk, cell)
        if chunk.versions:
            self._relabel(chunk.versions)

    def _append(self, chunk: TokenChunk, cell: str) -> None:
        if not self._runs or (self._runs[-1].version, self._runs[-1].cell) != (chunk.version, cell):
            self._runs.append(_Run(chunk.version, cell))
        run, logprobs = self._runs[-1], list(chunk.logprobs)
        if len(logprobs) != len(chunk.ids):
            self.gaps += 1
            logprobs = [float("nan")] * len(chunk.ids)  # which belongs to which is unknown
        elif not np.isfinite(logprobs).all():
            self.not_finite += 1
        run.ids += chunk.ids
        run.logprobs += logprobs
        self.ids += chunk.ids

    def _relabel(self, versions: list[tuple[int, int]]) -> None:
        """Give the last tokens the weights versions that the engine named at the end of its request."""
        labelled: list[_Run] = []
        for version, tokens in reversed(versions):
            while tokens and self._runs:
                run = self._runs[-1]
                take = min(tokens, len(run.ids))
                labelled.append(_Run(version, run.cell, run.ids[len(run.ids) - take :], run.logprobs[-take:]))
                del run.ids[len(run.ids) - take :], run.logprobs[-take:]
                tokens -= take
                if not run.ids:
                    self._runs.pop()
        for run in reversed(labelled):
            last = self._runs[-1] if self._runs else None
            if last is not None and (last.version, last.cell) == (run.version, run.cell):
                last.ids += run.ids
                last.logprobs += run.logprobs
            else:
                self._runs.append(run)

    @property
    def usable(self) -> bool:
        """False if anything is missing: part of a reply is no sample of the policy."""
        return not self.gaps and not self.not_finite

    def spans(self, *, trainable: bool = True) -> tuple[Span, ...]:
        """One span per run of one (version, cell); none can be trained if anything is missing."""
        return tuple(
            Span(
                np.asarray(run.ids, np.int32),
                np.asarray(run.logprobs, np.float32),
                version=run.version,
                cell=run.cell,
                trainable=trainable and self.usable,
            )
            for run in self._runs
            if run.ids
        )

    def __len__(self) -> int:
        return len(self.ids)
