"""Reads ``harness.options`` and ``tasks.options`` into an adapter's or a task set's own typed table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from opengyre.config import HarnessConfig
from opengyre.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read_options(options: Mapping[str, Any], table: type[T], where: str) -> T:
    """``options`` of the config key ``where`` as a ``table``.

    Raises ConfigError naming the key, its value and what would be accepted.
    """
    names = [field.name for field in msgspec.structs.fields(table)]
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            right = f"did you mean {near[0]}?" if near else "one of " + ", ".join(names)
            raise ConfigError("unknown key", where=f"{where}.{key}", right=right)
    try:
        return msgspec.convert(dict(options), table, strict=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`")
        value = options.get(key.partition("[")[0])
        place = f"{where}.{key}" if key else where  # a missing key has no place of its own
        raise ConfigError(f"{value!r}", where=place, right=what[0].lower() + what[1:]) from None


def harness_options(config: HarnessConfig, table: type[T]) -> T:
    """The options of an adapter that knows its own command. Raises ConfigError."""
    options = read_options(config.options, table, "harness.options")
    if config.command:
        raise ConfigError(f"{config.command!r}", where="harness.command", right='nothing; see kind = "command"')
    return options


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A harness's settings: ``theirs``, the user's, win, key by key; tables are merged."""
    out = dict(ours)
    for key, value in theirs.items():
        mine = out.get(key)
        out[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return out
