"""Reads ``harness.options`` into an adapter's own typed table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from opengyre.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read_options(options: Mapping[str, Any], table: type[T]) -> T:
    """``options`` as a ``table``. Raises ConfigError naming the key, its value and what would be accepted."""
    names = [field.name for field in msgspec.structs.fields(table)]
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            right = f"did you mean {near[0]}?" if near else "one of " + ", ".join(names)
            raise ConfigError("unknown key", where=f"harness.options.{key}", right=right)
    try:
        return msgspec.convert(dict(options), table, strict=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`")
        value = options.get(key.partition("[")[0])
        raise ConfigError(f"{value!r}", where=f"harness.options.{key}", right=what[0].lower() + what[1:]) from None


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A harness's settings: ``theirs``, the user's, win, key by key; tables are merged."""
    out = dict(ours)
    for key, value in theirs.items():
        mine = out.get(key)
        out[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return out
