"""Token ids as they go to an engine: one buffer, however long the prompt has grown.

A prompt of 256k tokens is sent again with every call. As a list of Python ints that is 10 MB and some milliseconds each
time; here it is a view of the buffer it grew in, and its JSON is kept there too, by whoever grows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray


class TokenIds(Sequence[int]):
    """Ids of one prompt, shape (T,), int32. Equal to any sequence of the same ids; a slice is a list.

    ``text`` gives the ids as JSON, where they are kept so already.
    """

    __slots__ = ("_text", "array")

    def __init__(self, array: NDArray[np.int32], text: Callable[[], bytes] | None = None) -> None:
        self.array, self._text = array, text

    def tolist(self) -> list[int]:
        """As Python ints."""
        ids: list[int] = self.array.tolist()
        return ids

    def json(self) -> bytes:
        """As a JSON list."""
        return self._text() if self._text is not None else msgspec.json.encode(self.tolist())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        item: int | list[int] = self.array[at].tolist()
        return item

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return bool(np.array_equal(self.array, other.array if isinstance(other, TokenIds) else np.asarray(other)))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenIds({self.tolist()})"


def as_json(ids: Sequence[int]) -> msgspec.Raw:
    """Ids for a JSON body that ``msgspec`` encodes."""
    return msgspec.Raw(ids.json() if isinstance(ids, TokenIds) else msgspec.json.encode(list(ids)))


def to_wire(value: Any) -> bytes:
    """``enc_hook`` of msgspec: the buffer, little-endian."""
    if isinstance(value, TokenIds):
        return value.array.astype("<i4", copy=False).tobytes()
    raise NotImplementedError(type(value).__name__)


def from_wire(kind: type, value: Any) -> TokenIds:
    """``dec_hook`` of msgspec: what ``to_wire`` made, or a list."""
    if kind is not TokenIds:
        raise NotImplementedError(kind.__name__)
    ids = np.frombuffer(value, "<i4") if isinstance(value, bytes) else np.asarray(value)
    return TokenIds(ids.astype(np.int32, copy=False))
