"""Trajectories made ready for training.

A sample is one root-to-leaf path with a mask: ``mask[t]`` is True where token t is trained *in this sample*. Across the
samples of an execution each sampled token is True at most once (SPEC §3.5). ``weight`` is 1/N_e with N_e the
execution's trainable tokens over all its samples, so an execution speaks with one voice however many paths it has.
"""

from __future__ import annotations

import msgspec
import numpy as np

from opengyre.errors import RecordError
from opengyre.record.types import Ids, Logprobs, Role


class Sample(msgspec.Struct, frozen=True, eq=False):
    """One chosen trajectory. Arrays have shape (T,); ``logprobs`` is NaN where the token was not sampled.

    ``segments`` are (node id, length in tokens) along the path, so that a packer can share common prefixes.
    ``oldest_version``/``newest_version`` are over the trainable tokens.
    """

    sample_id: str
    execution_id: str
    query_id: str
    role: Role
    ids: Ids
    mask: np.ndarray
    logprobs: Logprobs
    advantage: float
    weight: float
    oldest_version: int
    newest_version: int
    segments: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not (len(self.ids) == len(self.mask) == len(self.logprobs)):
            raise RecordError(
                f"sample {self.sample_id}: {len(self.ids)} ids, {len(self.mask)} mask, {len(self.logprobs)} log-probs"
            )
        if not bool(np.isfinite(self.logprobs[self.mask]).all()):
            raise RecordError(f"sample {self.sample_id}: a trainable token has no finite log-probability")
        if len(self.mask) and bool(self.mask[0]):
            raise RecordError(f"sample {self.sample_id}: the first token has no context and cannot be trained")

    @property
    def tokens(self) -> int:
        """Trainable tokens."""
        return int(self.mask.sum())


def to_wire(sample: Sample) -> dict[str, object]:
    """A msgpack-able form for the way to a cell."""
    return {
        "sample_id": sample.sample_id,
        "execution_id": sample.execution_id,
        "query_id": sample.query_id,
        "role": sample.role.value,
        "ids": np.ascontiguousarray(sample.ids).tobytes(),
        "mask": np.ascontiguousarray(sample.mask, dtype=np.uint8).tobytes(),
        "logprobs": np.ascontiguousarray(sample.logprobs, dtype=np.float32).tobytes(),
        "advantage": sample.advantage,
        "weight": sample.weight,
        "oldest_version": sample.oldest_version,
        "newest_version": sample.newest_version,
        "segments": [list(s) for s in sample.segments],
    }


def from_wire(wire: dict[str, object]) -> Sample:
    """Inverse of ``to_wire``."""
    w: dict = dict(wire)
    return Sample(
        sample_id=w["sample_id"],
        execution_id=w["execution_id"],
        query_id=w["query_id"],
        role=Role(w["role"]),
        ids=np.frombuffer(w["ids"], dtype=np.int32),
        mask=np.frombuffer(w["mask"], dtype=np.uint8).astype(bool),
        logprobs=np.frombuffer(w["logprobs"], dtype=np.float32),
        advantage=w["advantage"],
        weight=w["weight"],
        oldest_version=w["oldest_version"],
        newest_version=w["newest_version"],
        segments=tuple((int(a), int(b)) for a, b in w["segments"]),
    )
