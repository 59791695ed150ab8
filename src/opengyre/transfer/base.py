"""Moving named arrays between cells: weights out, gradients in, KV across.

A ``Ref`` travels in messages; the bytes travel beside them. A reader that gets fewer, other or damaged bytes gets a
TransferError, never an array.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Ref(msgspec.Struct, frozen=True):
    """A promise of bytes: ``key`` finds them, ``digest`` (hex) proves them, ``layout`` is (name, dtype, shape) each."""

    key: str
    nbytes: int
    digest: str
    layout: list[tuple[str, str, list[int]]]


class Transfer(Protocol):
    """Keyed, write-once storage that every cell of the run can reach."""

    def put(self, key: str, arrays: dict[str, Any]) -> Ref:
        """Store numpy arrays under ``key``. Visible to others only when complete."""
        ...

    def get(self, ref: Ref) -> dict[str, Any]:
        """Fetch the arrays (private copies). Raises TransferError when absent, short or damaged."""
        ...

    def drop(self, key: str) -> None:
        """Forget ``key``; absent keys are fine."""
        ...

    def close(self) -> None:
        """Remove everything this run stored."""
        ...
