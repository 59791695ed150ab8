"""Figures of a step and of a run, from what was counted."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from opengyre.cells.step import OpenStep
from opengyre.config import RunConfig
from opengyre.executions.outcome import ExecutionResult
from opengyre.samples.build import GroupSamples
from opengyre.training.base import StepStats


class Summary(msgspec.Struct, frozen=True):
    """How a run ended. ``before`` and ``after`` are the held-out evaluations, or None."""

    steps: int
    version: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class StepGroups:
    """The groups of one step, for its figures."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self._rewards: list[float] = []
        self._excluded = 0
        self._degenerate = 0
        self._oldest: int | None = None
        self._samples = 0

    def add(self, query_id: str, results: list[ExecutionResult], group: GroupSamples) -> None:
        """A group joined the step."""
        self.queries.append(query_id)
        self._rewards += [r.reward for r in results if r.reward is not None]
        self._excluded += sum(r.reward is None for r in results)
        self._degenerate += group.advantage.degenerate is not None
        self._samples += len(group.samples)
        versions = [s.oldest_version for s in group.samples]
        self._oldest = min(versions + ([] if self._oldest is None else [self._oldest]), default=None)

    def figures(self, step: OpenStep, stats: StepStats | None, config: RunConfig, *, step_s: float) -> dict[str, Any]:
        """What the event log and the journal keep of a committed step; ``stats`` is None if nothing was trainable."""
        micro = step.stats()
        tokens = sum(m.tokens for m in micro)
        trajectories = sum(m.trajectories for m in micro)
        passed = sum(r >= config.eval.pass_threshold for r in self._rewards)
        return {
            "step": step.number,
            "version": step.version if stats is None else stats.version,
            "loss": sum(m.loss_sum for m in micro) / step.executions if step.executions else None,
            "grad_norm": stats.grad_norm if stats else None,
            "learning_rate": stats.learning_rate if stats else None,
            "reward_mean": statistics.fmean(self._rewards) if self._rewards else None,
            "pass_rate": passed / len(self._rewards) if self._rewards else None,
            "executions": step.executions,
            "groups": len(self.queries),
            "degenerate": self._degenerate,
            "excluded": self._excluded,
            "samples": self._samples,
            "micro_steps": step.micro_steps,
            "tokens": tokens,
            "forward_tokens": sum(m.forward_tokens for m in micro),
            "staleness_max": None if self._oldest is None else step.version - self._oldest,
            "ratio_mean": sum(m.ratio_sum for m in micro) / trajectories if trajectories else None,
            "ratio_max": max((m.ratio_max for m in micro), default=None),
            "clip_fraction": sum(m.clipped for m in micro) / tokens if tokens else None,
            "logprob_gap": sum(m.logprob_gap_sum for m in micro) / tokens if tokens else None,
            "seconds": sum(m.seconds for m in micro),
            "step_s": step_s,
        }
