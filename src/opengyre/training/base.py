"""The contract of a training backend: one full replica that turns micro-steps into summed gradients.

    claim ─▶ micro_step(samples) ─▶ … ─▶ take_gradients() ─▶ core.add_gradients() ─▶ core.commit(n_executions)

Gradients are *sums* over micro-steps, never means: the number of valid executions is known only when the step closes,
so the core scales once, at commit. Nothing here knows of leases, cells or transports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec


class MicroStats(msgspec.Struct, frozen=True):
    """Sums over one micro-step. ``clipped`` and ``tokens`` count trainable tokens; ``forward_tokens`` all tokens."""

    loss_sum: float
    tokens: int
    forward_tokens: int
    clipped: int
    ratio_sum: float  # sum over trajectories of the sequence ratio s
    ratio_max: float
    trajectories: int
    logprob_gap_sum: float  # sum over tokens of |new - behaviour|
    seconds: float


class StepStats(msgspec.Struct, frozen=True):
    """One committed optimizer step."""

    version: int
    grad_norm: float
    learning_rate: float
    n_executions: int
    seconds: float


class Trainer(Protocol):
    """One training replica. ``version`` is the weights version it holds."""

    version: int

    def micro_step(self, samples: list[Any]) -> MicroStats:
        """Forward and backward over ``samples`` (list of samples.types.Sample); adds to the local gradient sums."""
        ...

    def take_gradients(self) -> dict[str, Any]:
        """Return the local gradient sums by parameter name (numpy arrays) and reset them to zero."""
        ...

    def add_gradients(self, gradients: dict[str, Any]) -> None:
        """Core only: add another replica's sums. Raises TrainingError on a missing name, shape or non-finite value."""
        ...

    def commit(self, n_executions: int) -> StepStats:
        """Core only: scale by 1/n_executions, clip, step the optimizer, version += 1, zero the sums."""
        ...

    def weights(self) -> dict[str, Any]:
        """Weights by Hugging Face parameter name (numpy arrays; tied tensors once)."""
        ...

    def load_weights(self, weights: dict[str, Any], version: int) -> None:
        """Replace the weights; drops local gradient sums."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint plus optimizer state to ``folder`` (which must not exist)."""
        ...

    def restore(self, folder: Path) -> None:
        """Load what ``save`` wrote. Raises TrainingError when the checkpoint is of another model."""
        ...
