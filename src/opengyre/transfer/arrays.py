"""Named numpy arrays as bytes, and back: what every transfer agrees on.

Numpy has no bfloat16, and giving it away for float32 would double the bytes. A bfloat16 array is therefore an array of
the one-field dtype ``BFLOAT16``: its bytes are the bytes, its field is its name, and its shape is its shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from opengyre.errors import TransferError

Layout = list[tuple[str, str, list[int]]]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
ALIGN = 64  # bytes; arrays start on a cache line, so that views of a mapped file are aligned


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype on the wire. Raises TransferError on anything but plain numbers."""
    if dtype == BFLOAT16:
        return "bfloat16"
    if dtype.kind not in "biufc":
        raise TransferError(f"dtype {dtype} cannot be sent", right="plain numbers")
    return dtype.name


def dtype_of(name: str) -> np.dtype[Any]:
    """Inverse of ``dtype_name``. Raises TransferError on a name that is no plain dtype."""
    if name == "bfloat16":
        return BFLOAT16
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise TransferError(f"unknown dtype {name!r}") from None
    if dtype.kind not in "biufc":
        raise TransferError(f"dtype {name!r} cannot be sent", right="plain numbers")
    return dtype


def layout_of(arrays: Mapping[str, np.ndarray]) -> Layout:
    """(name, dtype, shape) of each array, in the mapping's order."""
    return [(name, dtype_name(array.dtype), list(array.shape)) for name, array in arrays.items()]


def spans(layout: Layout) -> Iterator[tuple[str, np.dtype[Any], list[int], int, int]]:
    """(name, dtype, shape, offset, bytes) of each array; offsets are multiples of ``ALIGN``."""
    offset = 0
    for name, type_name, shape in layout:
        dtype = dtype_of(type_name)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        yield name, dtype, shape, offset, nbytes
        offset += -(-nbytes // ALIGN) * ALIGN


def size_of(layout: Layout) -> int:
    """Bytes of the whole, padding included."""
    return max((offset + -(-nbytes // ALIGN) * ALIGN for *_, offset, nbytes in spans(layout)), default=0)


def pieces(arrays: Mapping[str, np.ndarray]) -> Iterator[memoryview | bytes]:
    """The bytes of the arrays in order, each followed by its padding. Contiguous native arrays are not copied."""
    for array in arrays.values():
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        yield data.reshape(-1).view(np.uint8).data
        yield bytes(-data.nbytes % ALIGN)


def digest_of(layout: Layout, data: Iterable[memoryview | bytes]) -> str:
    """Hex blake2b over names, dtypes, shapes and bytes, so that a swapped or reshaped array is caught too."""
    state = hashlib.blake2b(repr([(n, d, list(s)) for n, d, s in layout]).encode(), digest_size=16)
    for piece in data:
        state.update(piece)
    return state.hexdigest()


def unpack(layout: Layout, data: np.ndarray) -> dict[str, np.ndarray]:
    """Views into ``data`` (uint8, whole blob), by name."""
    return {
        name: data[offset : offset + nbytes].view(dtype).reshape(shape)
        for name, dtype, shape, offset, nbytes in spans(layout)
    }
